# SPDX-License-Identifier: Apache-2.0
"""A run over time as arrays: running requests and KV use of each instance, and when requests ended.

`Timeline` is an event sink; the plots read nothing else.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from seer.metrics.events import Ended, Event, InstanceState, Preempted, Stepped
from seer.types import FinishReason

Floats = npt.NDArray[np.float64]


class Timeline:
    """Step functions of time by instance, sampled on a common grid when asked for."""

    def __init__(self, num_instances: int) -> None:
        self.num_instances = num_instances
        self._states: list[list[tuple[float, int, int]]] = [[(0.0, 0, 0)] for _ in range(num_instances)]
        self._ends_s: list[float] = []
        self._preemptions_s: list[float] = []

    def __call__(self, event: Event) -> None:
        """Take one event into account."""
        if isinstance(event, InstanceState):
            self._states[event.instance].append((event.t_s, event.num_running, event.kv_tokens))
        elif isinstance(event, Ended):
            if event.finish_reason != FinishReason.CANCELLED.value:
                self._ends_s.append(event.t_s)
        elif isinstance(event, Preempted):
            self._preemptions_s.append(event.t_s)
        elif isinstance(event, Stepped):
            self._preemptions_s.extend([event.t_s] * event.num_preempted)

    @property
    def makespan_s(self) -> float:
        """When the last request ended by itself."""
        return max(self._ends_s, default=0.0)

    def ends_s(self) -> Floats:
        """When requests ended, in order."""
        return np.sort(np.array(self._ends_s, dtype=np.float64))

    def preemptions_s(self) -> Floats:
        """When requests were preempted."""
        return np.array(self._preemptions_s, dtype=np.float64)

    def grid(self, num_points: int) -> Floats:
        """Middles of equal slices of the run."""
        return (np.arange(num_points, dtype=np.float64) + 0.5) * (self.makespan_s / num_points)

    def running(self, times_s: Floats) -> Floats:
        """Running requests, instances x times."""
        return self._sampled(times_s, 1)

    def kv_tokens(self, times_s: Floats) -> Floats:
        """Tokens in KV memory, instances x times."""
        return self._sampled(times_s, 2)

    def _sampled(self, times_s: Floats, column: int) -> Floats:
        rows = []
        for states in self._states:
            table = np.array(states, dtype=np.float64)
            rows.append(table[np.searchsorted(table[:, 0], times_s, side="right") - 1, column])
        return np.array(rows)
