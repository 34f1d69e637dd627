# SPDX-License-Identifier: Apache-2.0
"""The counts and times of an engine's steps, for the speculation budget and for metrics."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class StepReport:
    """Counts and times of one step, or of several that ran at once."""

    duration_s: float
    """Mean per step, without the time to load KV."""
    num_steps: int
    num_running: int
    num_batched_tokens: int
    """Mean tokens per forward pass, draft nodes included."""
    num_prefill_tokens: int
    mean_context_tokens: int
    num_emitted: int
    """Tokens that became part of a response."""
    num_drafted: int
    num_accepted: int
    load_s: float = 0.0
    """Time to load KV from the pool before the step."""
    overlapped_load_s: float = 0.0
    """Time to load KV from the pool while steps ran."""
    loaded_bytes: int = 0
    """KV loaded in both times."""
    far_load_s: float = 0.0
    """Of both times, for KV from other nodes."""
    far_loaded_bytes: int = 0
    """Of these bytes, from other nodes."""
    has_captured: bool = False
    """A CUDA graph was captured during the step, so its duration does not represent other steps."""
    num_preempted: int = 0
    """Requests that were preempted since the last report: their KV was dropped."""
    num_unsaved_blocks: int = 0
    """KV blocks that were not saved to the pool since the last report: it took longer than the engine may wait."""


StepObserver = Callable[[StepReport], None]
