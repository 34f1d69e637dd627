"""What a step of vLLM loaded, told by the worker that did it; it travels with the step's output to telemetry.py."""

from __future__ import annotations

from dataclasses import dataclass

from vllm.distributed.kv_transfer.kv_connector.v1.metrics import KVConnectorStats

LOADED_BYTES, LOAD_S, OVERLAPPED_LOAD_S = "seer_loaded_bytes", "seer_load_s", "seer_overlapped_load_s"


@dataclass
class LoadStats(KVConnectorStats):
    """Sums by name."""

    def reset(self) -> None:
        """Begin anew."""
        self.data = {}

    def aggregate(self, other: KVConnectorStats) -> LoadStats:
        """Add another's."""
        for name, value in other.data.items():
            self.data[name] = self.data.get(name, 0) + value
        return self

    def reduce(self) -> dict[str, int | float]:
        """Nothing is left to reduce."""
        return dict(self.data)

    def is_empty(self) -> bool:
        """Whether nothing was counted."""
        return not self.data
