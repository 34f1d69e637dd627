"""What a step of vLLM computed and what it loaded, told by the worker that did it.

vLLM's own numbers count a context as a whole when its first token is drawn, cached parts included, and say nothing of
what a preempted request computes again. The connector sees every step in both processes: the plan counts the rows, the
worker adds what loading took, and the sum travels with the step's output to our stat logger (telemetry.py).
"""

from __future__ import annotations

import time
from dataclasses import dataclass
from typing import Any

from vllm.distributed.kv_transfer.kv_connector.v1.metrics import KVConnectorStats

ROWS, PREFILL_ROWS = "seer_rows", "seer_prefill_rows"
AT_S = "seer_at_s"
"""When the step was launched: what lies between two of these is a step, however late its output is heard of."""
LOADED_BYTES, LOAD_S, LOAD_ASIDE_S = "seer_loaded_bytes", "seer_load_s", "seer_load_aside_s"


@dataclass
class StepStats(KVConnectorStats):
    """Sums by name, but for the time."""

    def reset(self) -> None:
        """Begin anew."""
        self.data = {}

    def aggregate(self, other: KVConnectorStats) -> StepStats:
        """Add another's."""
        for name, value in other.data.items():
            self.data[name] = value if name == AT_S else self.data.get(name, 0) + value
        return self

    def reduce(self) -> dict[str, int | float]:
        """Nothing is left to reduce."""
        return dict(self.data)

    def is_empty(self) -> bool:
        """Whether nothing was counted."""
        return not self.data


def step_stats(num_rows: int, num_prefill_rows: int, loads: dict[str, Any]) -> StepStats | None:
    """Of one step; None where there is nothing to tell."""
    data: dict[str, Any] = dict(loads)
    if num_rows:
        data |= {ROWS: num_rows, PREFILL_ROWS: num_prefill_rows, AT_S: time.monotonic()}
    return StepStats(data) if data else None
