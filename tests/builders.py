# SPDX-License-Identifier: Apache-2.0
"""One-line scenarios: `a_group(2)`, `a_fleet(blocks=10)`, `roll_out(a_workload([[5, 9], [3]]), "seer")`."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, cast

from seer.buffer import Request, RequestBuffer
from seer.context import Context
from seer.fleet import Fleet
from seer.metrics.events import Ended, Event, InstanceState, Started
from seer.request import RequestState
from seer.rollout import RolloutLoop
from seer.scheduling.base import Assignment, Scheduler
from seer.scheduling.registry import SchedulerSettings, make_scheduler, parse_scheduler
from seer.sim import virtual_time
from seer.sim.costs import Gpu, InstanceCost, ModelShape
from seer.sim.instance import SimulatedInstance
from seer.sim.speculation import GroupProgress, SpeculationModel
from seer.sim.workloads import Workload
from seer.types import (
    GROUP_DRAFTS,
    Chunk,
    ChunkEnd,
    ChunkOutput,
    FinishReason,
    Group,
    GroupResult,
    InstanceLimits,
    Response,
    Sampling,
    budget_rule,
)

DIVIDING = ("divided", "context", "oracle", "seer-paper", "seer")
"""Schedulers that promise memory before they use it."""
WHOLE = ("verl-sync", "verl", "group", "streamrl-oracle")
"""Schedulers that place a request once and leave memory to the engine."""


def a_group(id: int = 0, size: int = 4, *, prompt: int = 10, max_tokens: int = 1000, key: str | None = None) -> Group:
    return Group(id=id, num_requests=size, num_prompt_tokens=prompt, sampling=Sampling(max_tokens=max_tokens), key=key)


def a_buffer(*groups: Group, weights_version: int = 0) -> RequestBuffer:
    buffer = RequestBuffer(weights_version)
    buffer.admit(groups or [a_group()], 0.0)
    return buffer


def requests_of(*groups: Group) -> list[Request]:
    return list(a_buffer(*groups).requests())


def limits(
    blocks: int = 100, *, block_size: int = 64, max_num_seqs: int = 1000, max_model_len: int | None = None
) -> InstanceLimits:
    return InstanceLimits(
        kv_blocks=blocks,
        block_size=block_size,
        max_num_seqs=max_num_seqs,
        max_model_len=blocks * block_size if max_model_len is None else max_model_len,
    )


def a_fleet(instances: int = 2, *, blocks: int = 100, max_num_seqs: int = 1000) -> Fleet:
    return Fleet([limits(blocks, max_num_seqs=max_num_seqs)] * instances)


def end(request: Request, num_tokens: int) -> None:
    """It has ended by itself at this length."""
    request.num_generated = num_tokens
    request.state, request.finish_reason = RequestState.FINISHED, FinishReason.STOP


def a_context(finished: Mapping[int, int] | None = None) -> Context:
    """A context in which one request of each of these groups has ended, at these lengths."""
    context = Context()
    for group, length in (finished or {}).items():
        request = Request(0, a_group(group, max_tokens=max(length, 1)), 0, 0.0)
        request.num_generated = length
        context.observe_finished(request)
    return context


def a_scheduler(name: str, *, chunk_tokens: int = 100, context: Context | None = None) -> Scheduler:
    def true_length(request: Request) -> int:
        return request.max_tokens

    settings = SchedulerSettings(chunk_tokens=chunk_tokens)
    return make_scheduler(parse_scheduler(name), settings, context or Context(), true_length)


def drain(scheduler: Scheduler, fleet: Fleet) -> list[Assignment]:
    """Everything the scheduler starts now; memory is reserved for each assignment."""
    plans = []
    while (plan := scheduler.next(fleet)) is not None:
        fleet.promise(plan.request, plan.instance, plan.num_blocks, overcommit=plan.overcommit)
        plans.append(plan)
    return plans


def an_output(chunk: Chunk, tokens: int, end: ChunkEnd | None = None, *, error: str | None = None) -> ChunkOutput:
    return ChunkOutput(chunk.request, chunk.attempt, 0, tokens, end=end, error=error)


def a_response(token_ids: Sequence[int] = (1, 2), **changes: Any) -> Response:
    """A response of one chunk that ended by itself, without its text."""
    fields: dict[str, Any] = {
        "group": 0,
        "prompt_id": "0",
        "index": 0,
        "token_ids": list(token_ids),
        "logprobs": [-0.5] * len(token_ids),
        "finish_reason": FinishReason.STOP,
        "weights_version": 0,
        "seed": 0,
        "num_prompt_tokens": 1,
        "num_tokens": len(token_ids),
        "queued_s": 0.0,
        "started_s": 0.0,
        "finished_s": 1.0,
        "num_chunks": 1,
        "num_migrations": 0,
    }
    return Response(**fields | changes)


TINY = ModelShape(
    name="tiny",
    num_layers=2,
    hidden=64,
    num_heads=4,
    num_kv_heads=4,
    head_dim=16,
    intermediate=128,
    vocabulary=100,
)


def a_cost(kv_tokens: int = 10_000, *, overhead_s: float = 0.01, bandwidth_bytes_s: float = 1e9) -> InstanceCost:
    """A cost model of a small model on a GPU that holds exactly this much KV."""
    memory = TINY.weight_bytes + (kv_tokens + 0.5) * TINY.kv_bytes_per_token
    gpu = Gpu(
        name="test",
        memory_bytes=memory,
        bandwidth_bytes_s=bandwidth_bytes_s,
        bf16_flops_s=1e12,
        link_bytes_s=1e9,
        network_bytes_s=1e9,
    )
    return InstanceCost(model=TINY, gpu=gpu, overhead_s=overhead_s, memory_share=1.0)


def a_workload(
    lengths: Sequence[Sequence[int]],
    *,
    instances: int = 2,
    kv_tokens: int = 10_000,
    max_tokens: int | None = None,
    prompt: int = 10,
    chunk_tokens: int = 64,
    max_num_seqs: int = 1000,
) -> Workload:
    return Workload(
        name="test",
        lengths=tuple(map(tuple, lengths)),
        max_tokens=max_tokens or max(map(max, lengths)),
        prompt_tokens=prompt,
        cost=a_cost(kv_tokens),
        num_instances=instances,
        chunk_tokens=chunk_tokens,
        max_num_seqs=max_num_seqs,
    )


@dataclass
class Run:
    """The results and events of a rollout."""

    workload: Workload
    results: list[GroupResult] = field(default_factory=list)
    events: list[Event] = field(default_factory=list)
    loop: RolloutLoop | None = None

    @property
    def started(self) -> list[Started]:
        """The plan."""
        return [event for event in self.events if isinstance(event, Started)]

    def lengths(self) -> dict[int, list[int]]:
        return {r.group: [response.num_tokens for response in r.responses] for r in self.results}

    def makespan_s(self) -> float:
        return max(event.t_s for event in self.events if isinstance(event, Ended))


Disturbance = Callable[[RolloutLoop, list[SimulatedInstance], Callable[[int], SimulatedInstance]], None]


def roll_out(
    workload: Workload,
    scheduler: str,
    *,
    checked: bool = True,
    drafts: bool = True,
    enough_groups: int | None = None,
    disturb: Disturbance | None = None,
) -> Run:
    """Run the production loop over simulated instances and check its invariants at every event.

    `disturb` is called when the loop is ready, to schedule faults on the virtual clock. It gets the loop, its instances
    (replace one to restart it) and a function that makes new instances.
    """
    workload.check()
    spec = parse_scheduler(scheduler)
    flat = [length for row in workload.lengths for length in row]
    context = Context()
    progress = GroupProgress()
    run = Run(workload)
    model = None
    if drafts and spec.drafts != "none":
        model = SpeculationModel(spec.drafts in GROUP_DRAFTS, budget_rule(spec.drafts))

    def emit(event: Event) -> None:
        assert not run.events or event.t_s >= run.events[-1].t_s, f"{event} before {run.events[-1]}"
        run.events.append(event)
        if checked and run.loop is not None:
            _check(run.loop, event, promises=scheduler in DIVIDING)

    def an_instance(id: int) -> SimulatedInstance:
        return SimulatedInstance(
            id,
            workload.cost,
            workload.limits(),
            flat.__getitem__,
            speculation=model,
            progress=progress,
            events=emit,
        )

    async def rollout() -> None:
        instances = [an_instance(i) for i in range(workload.num_instances)]
        settings = SchedulerSettings(chunk_tokens=workload.chunk_tokens)
        chosen = make_scheduler(spec, settings, context, lambda request: flat[request.id])
        loop = run.loop = RolloutLoop(instances, chosen, context, events=emit)
        for instance in instances:
            await instance.start(loop.on_output)
        instances = cast("list[SimulatedInstance]", loop.instances)  # its own list: a restarted one is replaced there
        if disturb is not None:
            disturb(loop, instances, an_instance)
        async for result in loop.run(workload.groups(), enough_groups=enough_groups):
            run.results.append(result)
        for instance in instances:
            await instance.close()
        loop.buffer.check()
        loop.fleet.check()

    virtual_time.run(rollout())
    return run


def _check(loop: RolloutLoop, event: Event, *, promises: bool) -> None:
    loop.buffer.check()
    loop.fleet.check()
    if isinstance(event, InstanceState):
        room = loop.fleet.limits[event.instance].kv_tokens
        assert 0 <= event.kv_tokens <= room, f"{event.kv_tokens} tokens in memory for {room}"
    if promises:
        for instance in range(len(loop.fleet)):
            free = loop.fleet.free_blocks[instance]
            assert free >= 0, f"instance {instance} was promised {-free} blocks too many"
