# SPDX-License-Identifier: Apache-2.0
"""What a step of vLLM moved to and from the pool, counted by the worker and sent to telemetry.py with its output."""

from __future__ import annotations

from dataclasses import dataclass

from vllm.distributed.kv_transfer.kv_connector.v1.metrics import KVConnectorStats

LOADED_BYTES, LOAD_S, OVERLAPPED_LOAD_S = "seer_loaded_bytes", "seer_load_s", "seer_overlapped_load_s"
"""Names of the counts: bytes loaded, seconds a step waited for them, seconds of loads while steps ran."""
FAR_BYTES, FAR_S = "seer_far_loaded_bytes", "seer_far_load_s"
"""Of these, from other nodes."""
UNSAVED_BLOCKS = "seer_unsaved_blocks"
"""Blocks that were not saved, because all buffers for it were in use."""


@dataclass
class MoveStats(KVConnectorStats):
    """Sums by name."""

    def reset(self) -> None:
        """Start from zero."""
        self.data = {}

    def aggregate(self, other: KVConnectorStats) -> MoveStats:
        """Add other counts to these."""
        for name, value in other.data.items():
            self.data[name] = self.data.get(name, 0) + value
        return self

    def reduce(self) -> dict[str, int | float]:
        """The counts as they are."""
        return dict(self.data)

    def is_empty(self) -> bool:
        """Whether nothing was counted."""
        return not self.data
