# SPDX-License-Identifier: Apache-2.0
"""Where did the time go? A run's makespan, split by cause, beside the makespan of an ideal schedule.

Each instance has the whole makespan T to spend. Every second of it counts under exactly one heading:

    decode        step time of tokens that became part of a response
    prefill       step time of prompt tokens, and of tokens that tools gave, that had to be computed once
    recompute     step time of prefilled tokens beyond that: KV that was lost or missing after a move, and prompts that
                  siblings computed a second time, on another instance or before the first was done
    migration     time that steps waited for KV from the pool
    speculation   step time of draft tokens that were rejected
    overhead      requests running, but neither step nor transfer measured: scheduling, messages
    tail          nothing running, while at most the last tenth of the requests was left
    imbalance     nothing running before that, though another instance ran something
    tools         nothing running on any instance before the tail, while requests waited for their tools
    queueing      nothing running on any instance before the tail, otherwise

A step's time is split among its batched tokens in equal parts. The numbers are means over the instances, so they add up
to T. Where an instance reports no steps (`Stepped`), all of its running time counts as `decode`.

The oracle estimate is the makespan of an ideal schedule: all lengths known, longest remaining first, any request on any
instance at any step for free, prompts for free, no speculation, batches of one size on all instances. Its step cost is
base + slope·batched tokens, fitted to this run. It is an estimate, not a bound: a run whose steps cost less than the
fitted line, or one that speculates, can be faster.
"""

from __future__ import annotations

import heapq
import math
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from itertools import pairwise

from seer.metrics.events import Answered, Asked, Ended, Event, InstanceState, Queued, Stepped
from seer.metrics.summary import tail_start_s

HEADINGS = (
    "decode",
    "prefill",
    "recompute",
    "migration",
    "speculation",
    "overhead",
    "imbalance",
    "tail",
    "tools",
    "queueing",
)


@dataclass(frozen=True, slots=True)
class StepFit:
    """Seconds of a step: base + slope·batched tokens; prompt tokens have a cost of their own."""

    base_s: float
    slope_s: float
    prefill_s: float | None = None
    """Seconds per prompt token; None if no prompt token was measured: they then cost what any token does."""

    @property
    def prefill_token_s(self) -> float:
        """Seconds that a prompt token adds to a step."""
        return self.slope_s if self.prefill_s is None else self.prefill_s

    def step_s(self, num_batched_tokens: float, num_prefill_tokens: float = 0.0) -> float:
        """Seconds of a step over this many batched tokens and this many prompt tokens in addition."""
        return self.base_s + self.slope_s * num_batched_tokens + self.prefill_token_s * num_prefill_tokens


@dataclass(frozen=True, slots=True, kw_only=True)
class Explanation:
    """A run's time by cause, and the oracle estimate."""

    makespan_s: float
    seconds: dict[str, float]
    """By heading; they add up to the makespan."""
    busy_share: list[float]
    """Of each instance."""
    num_prefilled: int
    num_drafted: int
    num_accepted: int
    step: StepFit | None
    oracle_s: float | None
    """Makespan of the ideal schedule; None where steps were not measured."""


@dataclass(slots=True)
class _Instance:
    running: int = 0
    since_s: float = 0.0
    idle: list[tuple[float, float]] = field(default_factory=list)
    steps: list[Stepped] = field(default_factory=list)


class _Tools:
    """When requests waited for their tools, and what these gave."""

    def __init__(self) -> None:
        self.num_given = 0
        self.stretches: list[tuple[float, float]] = []
        """In which at least one request waited."""
        self._waiting: set[int] = set()
        self._since_s = 0.0

    def note(self, event: Asked | Answered | Ended) -> None:
        """Take one event into account."""
        if isinstance(event, Asked):
            self._since_s = self._since_s if self._waiting else event.t_s
            self._waiting.add(event.request)
            return
        self.num_given += event.num_tokens if isinstance(event, Answered) else 0
        if event.request in self._waiting:
            self._waiting.remove(event.request)
            if not self._waiting:
                self.stretches.append((self._since_s, event.t_s))


def explain(events: Iterable[Event], *, max_num_seqs: Sequence[int]) -> Explanation | None:
    """Split a run's time; None if nothing ended. `max_num_seqs` is that of each instance."""
    num_instances = len(max_num_seqs)
    instances = [_Instance() for _ in range(num_instances)]
    prompt_of: dict[int, int] = {}
    earlier_tokens: dict[int, int] = {}
    ends: list[tuple[float, int]] = []  # and the tokens that this run generated
    tools = _Tools()
    first_s = math.inf
    for event in events:
        if isinstance(event, Asked | Answered | Ended):
            tools.note(event)
        if isinstance(event, Queued):
            first_s = min(first_s, event.t_s)
            prompt_of[event.group] = event.num_prompt_tokens
            earlier_tokens[event.request] = event.num_generated
        elif isinstance(event, Ended):
            ends.append((event.t_s, event.num_generated - earlier_tokens.get(event.request, 0)))
        elif isinstance(event, Stepped):
            instances[event.instance].steps.append(event)
        elif isinstance(event, InstanceState):
            _note_state(instances[event.instance], event)
    if not ends or not math.isfinite(first_s):
        return None
    ends.sort()
    last_s = ends[-1][0]
    for one in instances:
        if not one.running:
            one.idle.append((one.since_s, last_s))
        one.idle = [(max(a, first_s), min(b, last_s)) for a, b in one.idle if b > first_s and a < last_s]
    tail_from_s = tail_start_s([end_s for end_s, _ in ends])
    makespan_s = last_s - first_s
    steps = [step for one in instances for step in one.steps]
    seconds = dict.fromkeys(HEADINGS, 0.0)
    _split_idle(seconds, instances, tail_from_s, tools.stretches)
    _split_busy(seconds, instances, makespan_s, sum(prompt_of.values()) + tools.num_given)
    fit = fit_steps(steps)
    lengths = [length for _, length in ends if length]
    return Explanation(
        makespan_s=makespan_s,
        seconds={heading: value / num_instances for heading, value in seconds.items()},
        busy_share=[1 - sum(b - a for a, b in one.idle) / makespan_s if makespan_s else 0.0 for one in instances],
        num_prefilled=sum(step.num_prefill_tokens for step in steps),
        num_drafted=sum(step.num_drafted for step in steps),
        num_accepted=sum(step.num_accepted for step in steps),
        step=fit,
        oracle_s=oracle_makespan_s(lengths, max_num_seqs, fit) if fit is not None else None,
    )


def _note_state(one: _Instance, event: InstanceState) -> None:
    if bool(event.num_running) != bool(one.running):
        if event.num_running:
            one.idle.append((one.since_s, event.t_s))
        one.since_s = event.t_s
    one.running = event.num_running


def _split_idle(
    seconds: dict[str, float],
    instances: Sequence[_Instance],
    tail_from_s: float,
    tools: Sequence[tuple[float, float]],
) -> None:
    """Split idle time: in the tail, while another instance ran something, while tools did, or while none did."""
    idle_change = _changes(stretch for one in instances for stretch in one.idle)
    tool_change = _changes(tools)
    num_idle = num_tools = 0
    for a, b in pairwise(sorted({*idle_change, *tool_change, tail_from_s})):
        num_idle += idle_change[a]
        num_tools += tool_change[a]
        if not num_idle:
            continue
        if a >= tail_from_s:
            heading = "tail"
        elif num_idle < len(instances):
            heading = "imbalance"
        elif num_tools:
            heading = "tools"
        else:
            heading = "queueing"
        seconds[heading] += num_idle * (b - a)


def _changes(stretches: Iterable[tuple[float, float]]) -> Counter[float]:
    """By how many more stretches cover the time from each of their edges on."""
    changes: Counter[float] = Counter()
    for from_s, to_s in stretches:
        changes[from_s] += 1
        changes[to_s] -= 1
    return changes


def _split_busy(
    seconds: dict[str, float], instances: Sequence[_Instance], makespan_s: float, num_prompt_tokens: int
) -> None:
    num_prefilled = sum(step.num_prefill_tokens for one in instances for step in one.steps)
    needed_share = min(1.0, num_prompt_tokens / num_prefilled) if num_prefilled else 1.0
    for one in instances:
        busy_s = makespan_s - sum(b - a for a, b in one.idle)
        measured_s = sum(step.duration_s + step.load_s for step in one.steps)
        if not one.steps or measured_s <= 0:
            seconds["decode"] += busy_s
            continue
        # Steps can reach a little beyond the measured running time; scaled down, they never count for more.
        scale = min(1.0, busy_s / measured_s)
        for step in one.steps:
            row_s = scale * step.duration_s / max(1, step.num_batched_tokens)
            rejected = step.num_drafted - step.num_accepted
            seconds["prefill"] += row_s * step.num_prefill_tokens * needed_share
            seconds["recompute"] += row_s * step.num_prefill_tokens * (1.0 - needed_share)
            seconds["migration"] += scale * step.load_s
            seconds["speculation"] += row_s * rejected
            seconds["decode"] += row_s * max(0, step.num_batched_tokens - step.num_prefill_tokens - rejected)
        seconds["overhead"] += busy_s - scale * measured_s


def fit_steps(steps: Sequence[Stepped]) -> StepFit | None:
    """Base and slope over reports without prompt tokens, then the cost of a prompt token; None without the former.

    Reports are weighted so that the fitted times add up to the measured time. What is computed from the fit is then not
    biased where a straight line fits badly.
    """
    pure = [step for step in steps if not step.num_prefill_tokens and step.num_steps]
    if not pure:
        return None
    base_s, slope_s = _base_and_slope(pure)
    mixed = [step for step in steps if step.num_prefill_tokens]
    num_prefilled = sum(step.num_prefill_tokens for step in mixed)
    if not num_prefilled:
        return StepFit(base_s, slope_s)
    beside_s = sum(base_s * s.num_steps + slope_s * (s.num_batched_tokens - s.num_prefill_tokens) for s in mixed)
    return StepFit(base_s, slope_s, max(0.0, sum(s.duration_s for s in mixed) - beside_s) / num_prefilled)


def _base_and_slope(pure: Sequence[Stepped]) -> tuple[float, float]:
    # Least squares of time against steps and batched tokens, each report weighted by one over its steps: the residuals
    # then add up to zero.
    total_s = sum(s.duration_s for s in pure)
    num_steps, num_batched_tokens = sum(s.num_steps for s in pure), sum(s.num_batched_tokens for s in pure)
    rr = sum(s.num_batched_tokens * s.num_batched_tokens / s.num_steps for s in pure)
    rt = sum(s.num_batched_tokens * s.duration_s / s.num_steps for s in pure)
    determinant = num_steps * rr - num_batched_tokens * num_batched_tokens
    if determinant <= 1e-9 * num_steps * rr:  # all steps alike: the slope alone explains them
        return 0.0, total_s / max(1, num_batched_tokens)
    base_s = (total_s * rr - rt * num_batched_tokens) / determinant
    slope_s = (rt * num_steps - total_s * num_batched_tokens) / determinant
    if base_s < 0:  # noise: one of the two explains everything
        return 0.0, total_s / num_batched_tokens
    if slope_s < 0:
        return total_s / num_steps, 0.0
    return base_s, slope_s


def oracle_makespan_s(lengths: Sequence[int], max_num_seqs: Sequence[int], fit: StepFit) -> float:
    """Seconds of the ideal schedule described above, on instances with so many slots each."""
    waiting = [-length for length in lengths]
    heapq.heapify(waiting)
    slots = sum(max_num_seqs)
    elapsed_s = 0.0
    quantum = max(1, max(lengths, default=0) // 2000)  # at least this many steps at once: bounds the work for long runs
    while waiting:
        # Run the longest `slots` until the shortest of them meets the longest that waits, or is done.
        running = [-heapq.heappop(waiting) for _ in range(min(slots, len(waiting)))]
        shortest = running[-1]
        meets = shortest + waiting[0] + 1 if waiting else shortest
        num_steps = min(shortest, max(quantum, meets))
        elapsed_s += num_steps * fit.step_s(len(running) / len(max_num_seqs))
        for left in running:
            if left > num_steps:
                heapq.heappush(waiting, -(left - num_steps))
    return elapsed_s
