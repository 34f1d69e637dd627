# SPDX-License-Identifier: Apache-2.0
"""The embedded engine: a compact PyTorch inference engine. Other engines are compared with it."""

from seer.engine.local.instance import LocalInstance

__all__ = ["LocalInstance"]
