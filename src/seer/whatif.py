"""What would another policy have made of a recorded run? Its lengths again, in virtual time, at its own step cost.

The rollout loop and the policies are the production code. Instances are the simulator's, with a step that
costs what the recorded steps were measured to cost (base + slope·rows) instead of a roofline; KV that moves
is free where there was a pool, and speculation is left out. Under the recorded policy the prediction can be
held against what was measured.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from seer.buffer import Request
from seer.context import Context
from seer.errors import InputError
from seer.explain import StepFit, explain
from seer.metrics.events import Ended, Queued
from seer.metrics.jsonl import read_events
from seer.metrics.summary import Summarizer, Summary
from seer.rollout import RolloutLoop
from seer.run import policy_settings
from seer.runs import RunFolder
from seer.scheduling.registry import make_policy, parse_policy
from seer.sim import virtual_time
from seer.sim.costs import H200, MODELS, InstanceCost, StepTime
from seer.sim.instance import SimulatedInstance
from seer.types import Group, InstanceLimits, Sampling


@dataclass(frozen=True, kw_only=True)
class MeasuredCost(InstanceCost):
    """A step costs what it was measured to; the hardware of the base class is not used."""

    fit: StepFit

    def step(self, num_requests: int, tokens_per_request: float = 1.0, prefill_tokens: float = 0.0) -> StepTime:
        """Base and slope, whatever the rows are for."""
        return StepTime(self.fit.step_s(num_requests * tokens_per_request + prefill_tokens), 0.0)

    def transfer_s(self, num_tokens: int) -> float:
        """Shared memory: next to nothing beside a step."""
        return 0.0


@dataclass(frozen=True, slots=True, kw_only=True)
class RecordedRun:
    """The part of a run that a replay needs."""

    policy: str
    groups: tuple[Group, ...]
    lengths: tuple[tuple[int, ...], ...]
    limits: InstanceLimits
    num_instances: int
    chunk_tokens: int | None
    fit: StepFit
    makespan_s: float


def read_recorded(folder: RunFolder) -> RecordedRun:
    """Read a finished run; refused where a response did not end or steps were not measured."""
    manifest = folder.read_manifest()
    options = manifest["options"]
    limits = InstanceLimits(**manifest["limits"])
    events = list(read_events(folder.events))
    queued = {event.request: event for event in events if isinstance(event, Queued)}
    ended = {event.request: event for event in events if isinstance(event, Ended)}
    cut = [request for request in queued if request not in ended or ended[request].reason not in ("stop", "length")]
    if cut or not queued:
        raise InputError(f"{folder.path}: {len(cut)} of {len(queued)} responses did not end by themselves")
    found = explain(events, num_instances=options["instances"], max_running=limits.max_running)
    if found is None or found.step is None:
        raise InputError(f"{folder.path} holds no measured steps", hint="only the local engine reports them")
    lengths: dict[int, dict[int, int]] = {}
    prompts: dict[int, int] = {}
    for request, event in queued.items():
        lengths.setdefault(event.group, {})[event.index] = ended[request].num_generated
        prompts[event.group] = event.num_prompt_tokens
    sampling = Sampling(max_tokens=max(options["max_tokens"], *(max(row.values()) for row in lengths.values())))
    groups = tuple(
        Group(id=group, num_requests=len(row), num_prompt_tokens=prompts[group], sampling=sampling)
        for group, row in sorted(lengths.items())
    )
    return RecordedRun(
        policy=options["policy"],
        groups=groups,
        lengths=tuple(tuple(row[index] for index in sorted(row)) for _, row in sorted(lengths.items())),
        limits=limits,
        num_instances=options["instances"],
        chunk_tokens=options["chunk_tokens"],
        fit=found.step,
        makespan_s=found.makespan_s,
    )


def replay_under(recorded: RecordedRun, policy: str) -> Summary:
    """The recorded lengths under a policy."""
    spec = parse_policy(policy)
    cost = MeasuredCost(model=MODELS["llama-8b"], gpu=H200, fit=recorded.fit)
    flat = [length for row in recorded.lengths for length in row]
    context = Context()
    summarizer = Summarizer(recorded.num_instances)
    longest = max(group.sampling.max_tokens for group in recorded.groups)
    settings = policy_settings(recorded.chunk_tokens, recorded.limits, longest)

    def true_length(request: Request) -> int:
        return flat[request.id]

    async def rollout() -> None:
        instances = [
            SimulatedInstance(i, cost, recorded.limits, flat.__getitem__, events=summarizer)
            for i in range(recorded.num_instances)
        ]
        chosen = make_policy(spec, settings, context, true_length)
        loop = RolloutLoop(instances, chosen, context, events=summarizer)
        for instance in instances:
            await instance.start(loop.on_output)
        async for _ in loop.run(recorded.groups):
            pass
        for instance in instances:
            await instance.close()

    virtual_time.run(rollout())
    return summarizer.summary()


def replay_all(recorded: RecordedRun, policies: Sequence[str]) -> dict[str, Summary]:
    """The recorded policy first, then the others, each once."""
    names = [recorded.policy, *(policy for policy in policies if policy != recorded.policy)]
    return {name: replay_under(recorded, name) for name in names}
