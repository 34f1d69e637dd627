# SPDX-License-Identifier: Apache-2.0
"""Turns the views of an instance into `InstanceState` events.

A view comes with every batch of outputs. An event is emitted only when one of its fields changed, so an idle instance
adds nothing to the log; and, while the same requests run, no more often than every `SAMPLE_S`.
"""

from __future__ import annotations

from seer.engine.base import InstanceView
from seer.metrics.events import EventSink, InstanceState
from seer.types import InstanceLimits

SAMPLE_S = 0.05
"""Between two events that differ in memory and drafts alone: they change with every step."""


class StateSampler:
    """Remembers the last view of one instance."""

    def __init__(self, instance: int, events: EventSink) -> None:
        self._instance = instance
        self._events = events
        self._last = InstanceView()
        self._last_state: InstanceState | None = None

    def reset(self) -> None:
        """Expect counters from zero: the instance was restarted."""
        self._last = InstanceView()

    def sample(self, view: InstanceView, now_s: float, limits: InstanceLimits | None) -> None:
        """Emit an event if the newest view differs from the last one."""
        before = self._last_state
        if (
            before is not None
            and now_s - before.t_s < SAMPLE_S
            and (view.num_running, view.num_waiting) == (before.num_running, before.num_waiting)
        ):
            return
        request_steps = max(0, view.num_steps - self._last.num_steps) * max(1, view.num_running)
        drafted = max(0, view.num_drafted - self._last.num_drafted)
        accepted = max(0, view.num_accepted - self._last.num_accepted)
        state = InstanceState(
            now_s,
            self._instance,
            view.num_running,
            view.num_waiting,
            view.used_kv_blocks * (limits.block_size if limits is not None else 1),
            draft_tokens=drafted / request_steps if request_steps else 0.0,
            accepted_per_step=1.0 + (accepted / request_steps if request_steps else 0.0),
        )
        self._last = view
        if self._last_state is None or _shown(state) != _shown(self._last_state):
            self._last_state = state
            self._events(state)


def _shown(state: InstanceState) -> tuple[float, ...]:
    return (
        state.num_running,
        state.num_waiting,
        state.kv_tokens,
        state.draft_tokens,
        state.accepted_per_step,
    )
