# SPDX-License-Identifier: Apache-2.0
"""The numbers of a rollout while it runs, from its events: for /metrics, the live page and `seer top`.

Invariants
  1. Memory follows the requests that have not ended; of ended ones only sums are kept.
  2. Sums never go down, whatever is lost or restarted.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from dataclasses import dataclass

from seer.metrics.events import (
    Answered,
    Asked,
    Dropped,
    Ended,
    Event,
    Extended,
    InstanceState,
    Placed,
    PoolErrors,
    Preempted,
    Prefilling,
    Queued,
    Started,
    Stepped,
    Stopped,
)
from seer.metrics.histograms import SECONDS, TOKENS, Histogram


@dataclass(slots=True)
class OpenRequest:
    """A request that has not ended."""

    group: int
    index: int
    num_prompt_tokens: int
    queued_s: float
    started_s: float | None = None
    instance: int | None = None
    """That runs it; None while it waits."""
    num_generated: int = 0
    asked_s: float | None = None
    """Since when it waits for its tool."""

    @property
    def state(self) -> str:
        """`running`; `at_tool` between two turns; `parked` if it has run and waits; otherwise `queued`."""
        if self.instance is not None:
            return "running"
        if self.asked_s is not None:
            return "at_tool"
        return "queued" if self.started_s is None else "parked"


class LiveCounts:
    """An event sink."""

    def __init__(self) -> None:
        self.open: dict[int, OpenRequest] = {}
        self.ended: Counter[str] = Counter()
        """By finish reason."""
        self.chunks: Counter[str] = Counter()
        """By the reason of their end."""
        self.prompt_tokens = 0
        self.migrations = 0
        self.node_changes = 0
        """Migrations to another node."""
        self._node_of: dict[int, str] = {}
        self.per_instance: defaultdict[str, Counter[int]] = defaultdict(Counter)
        """Sums by name, then by instance."""
        self.states: dict[int, InstanceState] = {}
        """The newest one of each instance."""
        self.turns = 0
        """Of the model, after which an environment was asked."""
        self.tool_failures = 0
        """Responses that ended as failed while they waited for their tools."""
        self.dropped_groups = self.dropped_tokens = 0
        """Groups that were whole and not kept, and what was generated for them."""
        self.tool_s = Histogram(SECONDS)
        self.queue_s = Histogram(SECONDS)
        self.latency_s = Histogram(SECONDS)
        self.response_tokens = Histogram(TOKENS)
        self.step_s: defaultdict[int, Histogram] = defaultdict(lambda: Histogram(SECONDS))
        self._take = {
            Queued: self._queued,
            Started: self._started,
            Extended: self._extended,
            Stopped: self._stopped,
            Asked: self._at_tool,
            Answered: self._at_tool,
            Dropped: self._dropped,
            Ended: self._ended,
            Prefilling: self._prefilling,
            Preempted: self._preempted,
            Stepped: self._stepped,
            InstanceState: self._state,
            Placed: self._placed,
            PoolErrors: self._pool_errors,
        }

    def __call__(self, event: Event) -> None:
        """Take one event into account."""
        take = self._take.get(type(event))
        if take is not None:
            take(event)  # type: ignore[operator]

    def requests_by_state(self) -> Counter[str]:
        """Open requests by state."""
        return Counter(request.state for request in list(self.open.values()))

    def generated_tokens(self) -> int:
        """By all instances."""
        return sum(self.per_instance["generation_tokens"].values())

    def _queued(self, event: Queued) -> None:
        self.open[event.request] = OpenRequest(
            event.group, event.index, event.num_prompt_tokens, event.t_s, num_generated=event.num_generated
        )
        self.prompt_tokens += event.num_prompt_tokens

    def _started(self, event: Started) -> None:
        request = self.open.get(event.request)
        if request is None:
            return
        if request.started_s is None:
            request.started_s = event.t_s
            self.queue_s.observe(event.t_s - request.queued_s)
        request.instance = event.instance
        before = event.migrated_from
        if before is not None:
            self.migrations += 1
            self.node_changes += self._node_of.get(before) != self._node_of.get(event.instance)

    def _placed(self, event: Placed) -> None:
        self._node_of[event.instance] = event.node

    def _extended(self, event: Extended) -> None:
        self._generated(event.request, event.instance, event.num_generated)

    def _stopped(self, event: Stopped) -> None:
        self._generated(event.request, event.instance, event.num_generated)
        self.chunks[event.reason] += 1
        request = self.open.get(event.request)
        if request is not None:
            request.instance = None

    def _ended(self, event: Ended) -> None:
        self.ended[event.finish_reason] += 1
        request = self.open.pop(event.request, None)
        if request is not None:
            self.latency_s.observe(event.t_s - request.queued_s)
            self.response_tokens.observe(event.num_generated)
            if request.asked_s is not None:
                self.tool_s.observe(event.t_s - request.asked_s)
                self.tool_failures += event.finish_reason == "failed"

    def _at_tool(self, event: Asked | Answered) -> None:
        request = self.open.get(event.request)
        self.turns += isinstance(event, Asked)
        if request is None:
            return
        if request.asked_s is not None:
            self.tool_s.observe(event.t_s - request.asked_s)
        request.asked_s = event.t_s if isinstance(event, Asked) else None

    def _dropped(self, event: Dropped) -> None:
        self.dropped_groups += 1
        self.dropped_tokens += event.num_tokens

    def _generated(self, request: int, instance: int, num_generated: int) -> None:
        known = self.open.get(request)
        if known is not None and num_generated > known.num_generated:
            self.per_instance["generation_tokens"][instance] += num_generated - known.num_generated
            known.num_generated = num_generated

    def _prefilling(self, event: Prefilling) -> None:
        self.per_instance["prefill_tokens"][event.instance] += event.num_tokens
        self.per_instance["recomputed_tokens"][event.instance] += event.num_recomputed
        self.per_instance["loaded_tokens"][event.instance] += event.num_loaded

    def _preempted(self, event: Preempted) -> None:
        self.per_instance["preemptions"][event.instance] += 1

    def _stepped(self, event: Stepped) -> None:
        sums = self.per_instance
        sums["steps"][event.instance] += event.num_steps
        sums["batched_tokens"][event.instance] += event.num_batched_tokens
        sums["draft_tokens"][event.instance] += event.num_drafted
        sums["accepted_tokens"][event.instance] += event.num_accepted
        sums["preemptions"][event.instance] += event.num_preempted
        sums["loaded_bytes"][event.instance] += event.loaded_bytes
        sums["far_loaded_bytes"][event.instance] += event.far_loaded_bytes
        sums["unsaved_blocks"][event.instance] += event.num_unsaved_blocks
        if event.num_steps:
            self.step_s[event.instance].observe(event.duration_s / event.num_steps, event.num_steps)

    def _state(self, event: InstanceState) -> None:
        self.states[event.instance] = event

    def _pool_errors(self, event: PoolErrors) -> None:
        instance = -1 if event.instance is None else event.instance
        self.per_instance["pool_failures"][instance] += event.num_failed + event.num_corrupt
