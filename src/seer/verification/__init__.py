# SPDX-License-Identifier: Apache-2.0
"""Verifies responses: scores them again with a plain forward pass."""
