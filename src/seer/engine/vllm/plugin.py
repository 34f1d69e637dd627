# SPDX-License-Identifier: Apache-2.0
"""What vLLM calls in every process of an engine, before it makes anything (entry point `vllm.general_plugins`).

An engine that has none of our settings is not changed.
"""

from __future__ import annotations

from seer.engine.vllm.gpu_drafts.install import allow_in_config
from seer.engine.vllm.leftovers import end_with_host, name_segments


def prepare() -> None:
    """Prepare this process for an engine of ours."""
    end_with_host()
    name_segments()
    allow_in_config()
