# SPDX-License-Identifier: Apache-2.0
"""The numbers of a run, computed from its events alone.

Definitions, with t_0 the first `Queued` and t_r the `Ended` of request r; cancelled requests are left out, but for
`cancelled_tokens`, what they had generated:
    makespan_s            max t_r - t_0
    throughput_tokens_s   generated tokens / makespan_s; of a resumed run, without those of its earlier parts
    tail_s                makespan_s - time at which 90% of the requests had ended (the paper's tail)
    group_*_s             over the groups without a cancelled request, the time from t_0 to a group's last end: the
                          median, the 90th percentile (both by nearest rank) and the last; None without such a group
    preemptions           `Preempted` events, and what `Stepped` counts
    recomputed_tokens     prefilled tokens whose KV had been computed before
    migrations            chunks started on another instance than the request's last one; migrated_tokens: KV pulled
    node_changes          of the migrations, those to another node; loaded_bytes: KV from the pool as engines count it,
                          far_loaded_bytes: of these, from other nodes
    idle_share            mean over instances of the time with nothing running, as a share of the makespan
    mean_accepted         tokens gained per request and step, weighted by request-steps' time share
    pool_failures         calls or blocks that the KV pool could not serve; pool_corrupt: blocks it found damaged;
                          pool_recomputed_tokens: computed again because of either
    pool_ssd_*_bytes      KV written to the pool's SSD tier, and read from it; pool_refused_blocks: KV blocks that
                          found no room in the pool
    num_turns             turns of the model after which an environment was asked; tool_wait_s: seconds from `Asked` to
                          `Answered` or `Ended`, summed over requests; tool_failures: waits that ended with `failed`
    dropped_*             groups that were whole and not kept; their generated tokens, and the seconds from start to end
                          of their requests, which the other numbers count too
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from seer.metrics.events import (
    Answered,
    Asked,
    Dropped,
    Ended,
    Event,
    InstanceState,
    Placed,
    PoolErrors,
    PoolUsed,
    Preempted,
    Prefilling,
    Queued,
    Started,
    Stepped,
)
from seer.types import FinishReason

TAIL_SHARE = 0.1
"""The paper's tail: the last tenth of the requests."""


def tail_start_s(ends_s: Sequence[float]) -> float:
    """When the tail begins, from the ends of all requests in order: at most a tenth of them still run then."""
    return ends_s[math.ceil(len(ends_s) * (1.0 - TAIL_SHARE)) - 1]


@dataclass(frozen=True, slots=True, kw_only=True)
class Summary:
    """The numbers that tables and comparisons show; the header defines them."""

    num_requests: int
    num_tokens: int
    cancelled_tokens: int
    makespan_s: float
    throughput_tokens_s: float
    tail_s: float
    preemptions: int
    recomputed_tokens: int
    migrations: int
    migrated_tokens: int
    idle_share: float
    mean_accepted: float
    group_median_s: float | None = None
    group_p90_s: float | None = None
    group_last_s: float | None = None
    pool_failures: int = 0
    pool_corrupt: int = 0
    pool_recomputed_tokens: int = 0
    pool_ssd_written_bytes: int = 0
    pool_ssd_read_bytes: int = 0
    pool_refused_blocks: int = 0
    node_changes: int = 0
    loaded_bytes: int = 0
    far_loaded_bytes: int = 0
    num_turns: int = 0
    tool_wait_s: float = 0.0
    tool_failures: int = 0
    dropped_groups: int = 0
    dropped_tokens: int = 0
    dropped_request_s: float = 0.0


class Summarizer:
    """An event sink that adds up; memory grows only with the number of requests (their groups and end times)."""

    def __init__(self, num_instances: int) -> None:
        self._first_s = math.inf
        self._ends_s: list[float] = []
        self._group_of: dict[int, int] = {}
        self._group_ends_s: dict[int, float] = {}
        self._cut_groups: set[int] = set()
        self._num_tokens = 0
        self._earlier_tokens: dict[int, int] = {}  # of requests that an earlier part of the run had begun
        self._num_earlier_tokens = 0
        self._cancelled_tokens = 0
        self._preemptions = 0
        self._recomputed = 0
        self._migrations = 0
        self._migrated_tokens = 0
        self._state_since_s = [0.0] * num_instances
        self._running = [0] * num_instances
        self._accepted = [1.0] * num_instances
        self._busy_s = [0.0] * num_instances
        self._request_seconds = 0.0
        self._accepted_request_seconds = 0.0
        self._pool_failures = self._pool_corrupt = self._pool_recomputed = 0
        self._pool_used: list[PoolUsed] = []
        self._dropped: list[Dropped] = []
        self._node_of: dict[int, str] = {}
        self._node_changes = self._loaded_bytes = self._far_loaded_bytes = 0
        self._asked_s: dict[int, float] = {}
        self._num_turns = self._tool_failures = 0
        self._tool_wait_s = 0.0
        self._notes: dict[type[Event], Callable[[Any], None]] = {
            InstanceState: self._note_state,
            Started: self._note_start,
            Prefilling: self._note_prefill,
            Ended: self._note_end,
            Queued: self._note_queued,
            Preempted: self._note_preempted,
            Stepped: self._note_step,
            Asked: self._note_turn,
            Answered: self._note_turn,
            Dropped: self._dropped.append,
            PoolUsed: self._pool_used.append,
            Placed: self._note_place,
            PoolErrors: self._note_pool_errors,
        }

    def __call__(self, event: Event) -> None:
        """Take one event into account. Of a kind that is not in the table, nothing is counted."""
        note = self._notes.get(type(event))
        if note is not None:
            note(event)

    def summary(self) -> Summary:
        """The numbers of a finished run."""
        assert self._ends_s, "no request has ended by itself"
        ends = sorted(self._ends_s)
        makespan_s = ends[-1] - self._first_s
        for instance in range(len(self._running)):
            self._account(instance, ends[-1])
        busy = sum(self._busy_s) / len(self._busy_s)
        groups_s = sorted(
            end_s - self._first_s for group, end_s in self._group_ends_s.items() if group not in self._cut_groups
        )
        return Summary(
            num_requests=len(ends),
            num_tokens=self._num_tokens,
            cancelled_tokens=self._cancelled_tokens,
            makespan_s=makespan_s,
            throughput_tokens_s=(self._num_tokens - self._num_earlier_tokens) / makespan_s if makespan_s else 0.0,
            tail_s=ends[-1] - tail_start_s(ends),
            group_median_s=_nearest_rank(groups_s, 0.5),
            group_p90_s=_nearest_rank(groups_s, 0.9),
            group_last_s=_nearest_rank(groups_s, 1.0),
            preemptions=self._preemptions,
            recomputed_tokens=self._recomputed,
            migrations=self._migrations,
            migrated_tokens=self._migrated_tokens,
            idle_share=max(0.0, 1.0 - busy / makespan_s) if makespan_s else 0.0,
            mean_accepted=self._accepted_request_seconds / self._request_seconds if self._request_seconds else 1.0,
            pool_failures=self._pool_failures,
            pool_corrupt=self._pool_corrupt,
            pool_recomputed_tokens=self._pool_recomputed,
            pool_ssd_written_bytes=sum(one.ssd_written_bytes for one in self._pool_used),
            pool_ssd_read_bytes=sum(one.ssd_read_bytes for one in self._pool_used),
            pool_refused_blocks=sum(one.num_refused for one in self._pool_used),
            node_changes=self._node_changes,
            loaded_bytes=self._loaded_bytes,
            far_loaded_bytes=self._far_loaded_bytes,
            num_turns=self._num_turns,
            tool_wait_s=self._tool_wait_s,
            tool_failures=self._tool_failures,
            dropped_groups=len(self._dropped),
            dropped_tokens=sum(one.num_tokens for one in self._dropped),
            dropped_request_s=sum(one.request_s for one in self._dropped),
        )

    def _note_start(self, event: Started) -> None:
        before = event.migrated_from
        if before is not None:
            self._migrations += 1
            self._node_changes += self._node_of.get(before) != self._node_of.get(event.instance)

    def _note_end(self, event: Ended) -> None:
        group = self._group_of.get(event.request)
        if event.request in self._asked_s:
            self._tool_failures += event.finish_reason == FinishReason.FAILED.value
            self._tool_wait_s += event.t_s - self._asked_s.pop(event.request)
        if event.finish_reason == FinishReason.CANCELLED.value:
            self._cancelled_tokens += event.num_generated
            if group is not None:
                self._cut_groups.add(group)
        else:
            self._ends_s.append(event.t_s)
            self._num_tokens += event.num_generated
            self._num_earlier_tokens += self._earlier_tokens.pop(event.request, 0)
            if group is not None:
                self._group_ends_s[group] = event.t_s

    def _note_turn(self, event: Asked | Answered) -> None:
        if isinstance(event, Asked):
            self._num_turns += 1
            self._asked_s[event.request] = event.t_s
        else:
            self._tool_wait_s += event.t_s - self._asked_s.pop(event.request, event.t_s)

    def _note_queued(self, event: Queued) -> None:
        self._first_s = min(self._first_s, event.t_s)
        self._group_of[event.request] = event.group
        if event.num_generated:
            self._earlier_tokens[event.request] = event.num_generated

    def _note_prefill(self, event: Prefilling) -> None:
        self._recomputed += event.num_recomputed
        self._migrated_tokens += event.num_loaded

    def _note_preempted(self, event: Preempted) -> None:
        self._preemptions += 1

    def _note_step(self, event: Stepped) -> None:
        self._preemptions += event.num_preempted
        self._loaded_bytes += event.loaded_bytes
        self._far_loaded_bytes += event.far_loaded_bytes

    def _note_place(self, event: Placed) -> None:
        self._node_of[event.instance] = event.node

    def _note_pool_errors(self, event: PoolErrors) -> None:
        self._pool_failures += event.num_failed
        self._pool_corrupt += event.num_corrupt
        self._pool_recomputed += event.num_recomputed

    def _note_state(self, event: InstanceState) -> None:
        instance = event.instance
        if instance >= len(self._running):
            self._add_instances(instance + 1, event.t_s)
        self._account(instance, event.t_s)
        self._running[instance] = event.num_running
        self._accepted[instance] = event.accepted_per_step

    def _add_instances(self, num_instances: int, now_s: float) -> None:
        """Instances that joined later."""
        more = num_instances - len(self._running)
        self._state_since_s += [now_s] * more
        self._running += [0] * more
        self._accepted += [1.0] * more
        self._busy_s += [0.0] * more

    def _account(self, instance: int, now_s: float) -> None:
        elapsed_s = now_s - self._state_since_s[instance]
        self._state_since_s[instance] = now_s
        running = self._running[instance]
        if running:
            self._busy_s[instance] += elapsed_s
            self._request_seconds += running * elapsed_s
            self._accepted_request_seconds += running * elapsed_s * self._accepted[instance]


def _nearest_rank(ordered: Sequence[float], share: float) -> float | None:
    """The least value that `share` of the values do not exceed; None if there are none."""
    return ordered[math.ceil(len(ordered) * share) - 1] if ordered else None
