# SPDX-License-Identifier: Apache-2.0
"""How would another scheduler have done on a recorded run? Replays its lengths in virtual time at its own step cost.

The rollout loop and the schedulers are the production code. Instances are the simulator's, but a step costs what the
recorded steps were measured to cost (base + slope·batched tokens) instead of a roofline. Moving KV takes as long per
token as in the recorded run, and no time if nothing moved there. For schedulers that draft, drafts are as long and as
often accepted as in the recorded run at the same batch size; if it drafted nothing, the replay drafts nothing. Unlike
instances have limits of their own, and those with the same limits a step cost of their own. A replay of the recorded
scheduler shows how far the prediction is from the measurement. Responses with turns talk to tools that
give as many tokens after as many seconds as in the recorded run.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field

from seer.analysis.explain import StepFit, explain, fit_steps
from seer.analysis.tool_waits import recorded_turns
from seer.buffer import Request
from seer.context import Context
from seer.errors import InputError
from seer.metrics.events import Ended, Event, Prefilling, Queued, Started, Stepped
from seer.metrics.run_events import count_instances, read_run_events
from seer.metrics.summary import Summarizer, Summary
from seer.rollout import RolloutLoop
from seer.runs.run import longest_context, scheduler_settings
from seer.runs.run_folder import RunFolder
from seer.scheduling.registry import make_scheduler, parse_scheduler
from seer.sim import virtual_time
from seer.sim.chunk_limit import refuse_endless
from seer.sim.cluster import complete_groups
from seer.sim.conversations import Conversations
from seer.sim.costs import H200, MODELS, InstanceCost, StepTime
from seer.sim.instance import SimulatedInstance
from seer.sim.turns import RequestTurns
from seer.transfer import MoveCost, PrefillCost, TransferCosts, TransferEstimate
from seer.types import FinishReason, Group, InstanceLimits, Sampling


@dataclass(frozen=True, slots=True)
class DraftGain:
    """What drafting cost and gained at one batch size."""

    tokens_per_request: float
    """Batched tokens of a step for each request in it: one, and its drafts."""
    tokens_per_step: float
    """Tokens a request gained by a step."""


NO_DRAFTS = DraftGain(1.0, 1.0)
"""A step of plain decoding: one token computed and one gained per request."""


MIN_STEP_S = 1e-9
"""Virtual time would stand still if the steps of a damaged recording took none."""


@dataclass(frozen=True, kw_only=True)
class RecordedCost(InstanceCost):
    """The measured cost of a step; the hardware of the base class is not used."""

    fit: StepFit
    gains: dict[int, DraftGain] = field(default_factory=dict)
    """By batch size, as a power of two; empty without drafts."""
    load_token_s: float = 0.0
    """Seconds to load the KV of a token from the pool."""

    def step(self, num_requests: int, tokens_per_request: float = 1.0, prefill_tokens: float = 0.0) -> StepTime:
        """Base, slope and the cost of prompt tokens.

        The simulated instance gains one token per request and step, so a step that gained more takes that much less.
        """
        gain = self._gain(num_requests)
        num_tokens = num_requests * tokens_per_request * gain.tokens_per_request
        return StepTime(max(MIN_STEP_S, self.fit.step_s(num_tokens, prefill_tokens) / gain.tokens_per_step), 0.0)

    def transfer_s(self, num_tokens: int) -> float:
        """As measured."""
        return num_tokens * self.load_token_s

    def transfer_costs(self) -> TransferCosts:
        """As charged."""
        return TransferCosts(
            move=MoveCost(latency_s=0.0, bandwidth_bytes_s=1.0 / self.load_token_s if self.load_token_s else math.inf),
            prefill=PrefillCost(fixed_s=self.fit.base_s, per_token_s=self.fit.prefill_token_s),
            bytes_per_token=1,
        )

    def _gain(self, num_requests: int) -> DraftGain:
        if not self.gains:
            return NO_DRAFTS
        near = min(self.gains, key=lambda size: (abs(size - _bucket(num_requests)), size))
        return self.gains[near]


@dataclass(frozen=True, slots=True, kw_only=True)
class RecordedRun:
    """What a replay needs of a run."""

    scheduler: str
    groups: tuple[Group, ...]
    lengths: tuple[tuple[int, ...], ...]
    limits: tuple[InstanceLimits, ...]
    """Of each instance."""
    chunk_tokens: int | None
    fit: StepFit
    """Over all instances."""
    makespan_s: float
    fits: Mapping[InstanceLimits, StepFit] = field(default_factory=dict)
    """Where instances differ: over those with these limits, if they measured a step without prompts."""
    gains: dict[int, DraftGain] = field(default_factory=dict)
    """By batch size; empty where nothing was drafted."""
    load_token_s: float = 0.0
    """Seconds to load the KV of a token from the pool; 0 where none was loaded."""
    turns: tuple[RequestTurns, ...] = ()
    """Of every response, group after group; empty without an environment."""

    def fit_of(self, limits: InstanceLimits) -> StepFit:
        """The step cost of an instance with these limits."""
        return self.fits.get(limits, self.fit)


def read_recorded(folder: RunFolder) -> RecordedRun:
    """Read a finished run; refused where a response did not end or steps were not measured."""
    manifest = folder.read_facts()
    options = manifest.options
    if manifest.limits is None or options.max_tokens is None:
        raise InputError(f"{folder.path} ended before its instances had started", hint="there is nothing to replay")
    events = read_run_events(folder.events, options.instances)
    if count_instances(events, options.instances) > options.instances:
        raise InputError(
            f"{folder.path}: some of its instances joined while it ran",
            hint="a replay has the same instances from the beginning to the end",
        )
    try:
        return recorded_run(
            events,
            scheduler=options.scheduler,
            limits=[one.as_limits() for one in manifest.limits_of_all(options.instances)],
            max_tokens=options.max_tokens,
            chunk_tokens=options.chunk_tokens,
        )
    except InputError as error:
        raise InputError(f"{folder.path}: {error}", hint=error.hint) from None


def recorded_run(
    events: Sequence[Event],
    *,
    scheduler: str,
    limits: Sequence[InstanceLimits],
    max_tokens: int,
    chunk_tokens: int | None,
) -> RecordedRun:
    """What a replay needs of a run's events; `limits` are those of each instance."""
    queued = {event.request: event for event in events if isinstance(event, Queued)}
    ended = {event.request: event for event in events if isinstance(event, Ended)}
    cut = [r for r in queued if r not in ended or not FinishReason(ended[r].finish_reason).is_complete]
    if cut or not queued:
        raise InputError(f"{len(cut)} of {len(queued)} responses did not end by themselves")
    if any(event.num_generated for event in queued.values()):
        raise InputError(
            "the run was resumed, and these are the events of its last part",
            hint="replay a run that was not interrupted",
        )
    found = explain(events, max_num_seqs=[one.max_num_seqs for one in limits])
    if found is None or found.step is None:
        raise InputError("no steps were measured", hint="the fake engine reports none")
    if found.makespan_s <= 0:
        raise InputError("all responses had ended when the first one came", hint="the events are damaged")
    lengths, prompts = _lengths(queued.values(), ended)
    longest = max(max_tokens, *(max(row.values()) for row in lengths.values()))
    refuse_endless(
        (length for row in lengths.values() for length in row.values()),
        scheduler_settings(chunk_tokens, limits, longest, None).chunk_tokens,
        sum(isinstance(event, Started) for event in events),
    )
    sampling = Sampling(max_tokens=longest)
    groups = tuple(
        Group(id=group, num_requests=len(row), num_prompt_tokens=prompts[group], sampling=sampling)
        for group, row in sorted(lengths.items())
    )
    return RecordedRun(
        scheduler=scheduler,
        groups=groups,
        lengths=tuple(tuple(row[index] for index in sorted(row)) for _, row in sorted(lengths.items())),
        limits=tuple(limits),
        chunk_tokens=chunk_tokens,
        fit=found.step,
        fits=_fits(events, limits),
        makespan_s=found.makespan_s,
        gains=draft_gains(event for event in events if isinstance(event, Stepped)),
        load_token_s=_load_token_s(events),
        turns=_turns(events, sorted(queued.values(), key=lambda one: (one.group, one.index)), ended),
    )


def _lengths(queued: Iterable[Queued], ended: Mapping[int, Ended]) -> tuple[dict[int, dict[int, int]], dict[int, int]]:
    """Tokens of each response by group and index, and of each group's prompt."""
    lengths: dict[int, dict[int, int]] = {}
    prompts: dict[int, int] = {}
    for event in queued:
        row, length = lengths.setdefault(event.group, {}), ended[event.request].num_generated
        if event.index in row:
            raise InputError(f"group {event.group} has two responses {event.index}", hint="the events are damaged")
        if length < 1:
            raise InputError(f"request {event.request} generated {length} tokens", hint="the events are damaged")
        row[event.index] = length
        prompts[event.group] = event.num_prompt_tokens
    return lengths, prompts


def _fits(events: Iterable[Event], limits: Sequence[InstanceLimits]) -> dict[InstanceLimits, StepFit]:
    """Of each kind of instance, where there are several."""
    if len(set(limits)) == 1:
        return {}
    steps: dict[InstanceLimits, list[Stepped]] = {}
    for event in events:
        if isinstance(event, Stepped):
            steps.setdefault(limits[event.instance], []).append(event)
    return {kind: fit for kind, own in steps.items() if (fit := fit_steps(own)) is not None}


def _turns(events: Sequence[Event], queued: Sequence[Queued], ended: Mapping[int, Ended]) -> tuple[RequestTurns, ...]:
    found = recorded_turns(events)
    if not found:
        return ()
    known = []
    for event in queued:
        turns = found.get(event.request)
        if turns is not None and turns.is_whole and turns.num_generated == ended[event.request].num_generated:
            known.append(turns)
    missing = len(queued) - len(known)
    if missing:
        raise InputError(f"the turns of {missing} responses are not in the events", hint="was the run resumed?")
    return tuple(known)


def _load_token_s(events: Iterable[Event]) -> float:
    num_tokens, seconds = 0, 0.0
    for event in events:
        if isinstance(event, Stepped):
            seconds += event.load_s + event.overlapped_load_s
        elif isinstance(event, Prefilling):
            num_tokens += event.num_loaded
    return seconds / num_tokens if num_tokens else 0.0


def draft_gains(steps: Iterable[Stepped]) -> dict[int, DraftGain]:
    """What drafting cost and gained at each batch size (a power of two), over steps without prompt tokens."""
    sums: dict[int, list[int]] = {}
    for step in steps:
        request_steps = step.num_emitted - step.num_accepted  # each gains one token and what was accepted
        if step.num_prefill_tokens or not step.num_steps or request_steps <= 0:
            continue
        total = sums.setdefault(_bucket(request_steps / step.num_steps), [0, 0, 0])
        total[0] += request_steps
        total[1] += step.num_drafted
        total[2] += step.num_accepted
    if not any(drafted for _, drafted, _ in sums.values()):
        return {}
    return {
        size: DraftGain(1.0 + drafted / request_steps, 1.0 + accepted / request_steps)
        for size, (request_steps, drafted, accepted) in sorted(sums.items())
    }


def _bucket(num_requests: float) -> int:
    return 1 << max(0, round(math.log2(max(1.0, num_requests))))


def replay_under(recorded: RecordedRun, scheduler: str) -> Summary:
    """The recorded lengths under a scheduler."""
    spec = parse_scheduler(scheduler)
    gains = recorded.gains if spec.drafts != "none" else {}

    def cost(fit: StepFit) -> RecordedCost:
        return RecordedCost(
            model=MODELS["llama-8b"], gpu=H200, fit=fit, gains=gains, load_token_s=recorded.load_token_s
        )

    flat = [length for row in recorded.lengths for length in row]
    context = Context()
    summarizer = Summarizer(len(recorded.limits))
    longest = max(group.sampling.max_tokens for group in recorded.groups)
    transfer = TransferEstimate(cost(recorded.fit).transfer_costs())
    settings = scheduler_settings(recorded.chunk_tokens, recorded.limits, longest, transfer)

    def true_length(request: Request) -> int:
        return flat[request.id]

    most = longest_context(recorded.limits)
    talks = Conversations(recorded.groups, recorded.turns, max_context_tokens=most) if recorded.turns else None
    turn_end, on_turn = (talks.turn_end, talks.on_turn) if talks else (None, None)

    async def rollout() -> None:
        instances = [
            SimulatedInstance(
                i, cost(recorded.fit_of(limits)), limits, flat.__getitem__, events=summarizer, turn_end=turn_end
            )
            for i, limits in enumerate(recorded.limits)
        ]
        chosen = make_scheduler(spec, settings, context, true_length)
        loop = RolloutLoop(instances, chosen, context, events=summarizer, on_turn=on_turn)
        async for _ in complete_groups(loop, instances, recorded.groups, talks):
            pass

    virtual_time.run(rollout())
    return summarizer.summary()


def replay_all(recorded: RecordedRun, schedulers: Sequence[str]) -> dict[str, Summary]:
    """The recorded scheduler first, then the others, each once."""
    names = [recorded.scheduler, *(scheduler for scheduler in schedulers if scheduler != recorded.scheduler)]
    return {name: replay_under(recorded, name) for name in names}
