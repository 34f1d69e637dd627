"""Run one workload under one scheduler in virtual time: the production rollout loop over simulated instances."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Literal

from seer.buffer import Request
from seer.context import Context
from seer.metrics.events import Event, EventSink
from seer.metrics.summary import Summarizer, Summary
from seer.placement import PlacementConfig
from seer.rollout import RolloutLoop
from seer.scheduling.registry import SchedulerSettings, make_scheduler, parse_scheduler
from seer.sim import virtual_time
from seer.sim.instance import SimulatedInstance
from seer.sim.speculation import AcceptanceCurve, GroupProgress, SpeculationModel
from seer.sim.workloads import Workload
from seer.speculation.budget import Rule
from seer.transfer import TransferEstimate

Speculation = Literal["auto", "off"]


@dataclass(frozen=True, slots=True, kw_only=True)
class SimulationResult:
    """One scheduler on one workload."""

    workload: Workload
    scheduler: str
    off_policy: bool
    summary: Summary
    wall_s: float
    """Real seconds the simulation took."""


def simulate(
    workload: Workload,
    scheduler: str,
    *,
    speculation: Speculation = "auto",
    settings: SchedulerSettings | None = None,
    budget_rule: Rule = "marginal",
    curve: AcceptanceCurve | None = None,
    length_hints: Mapping[str, int] | None = None,
    events: EventSink | None = None,
    progress: Callable[[int, int], None] | None = None,
) -> SimulationResult:
    """Roll the workload out to the end; `events` also receives everything that happens.

    `length_hints` is what an earlier epoch taught of the groups' lengths, by the group's number as text.
    """
    workload.check()
    began_s = time.perf_counter()
    spec = parse_scheduler(scheduler)
    wanted_groups = len(workload.lengths)
    if spec.oversample > 1:
        workload = replace(workload, lengths=workload.lengths * spec.oversample)
    flat = [length for row in workload.lengths for length in row]
    model: SpeculationModel | None = None
    if speculation == "auto" and spec.drafts != "none":
        model = SpeculationModel(spec.drafts == "grouped", budget_rule, curve or AcceptanceCurve())
    groups = GroupProgress()
    summarizer = Summarizer(workload.num_instances)
    sinks: list[EventSink] = [summarizer]
    if events is not None:
        sinks.append(events)
    emit = sinks[0] if len(sinks) == 1 else _fan_out(sinks)

    settings = settings or SchedulerSettings(
        chunk_tokens=workload.chunk_tokens,
        placement=PlacementConfig(transfer=TransferEstimate(workload.cost.transfer_costs())),
    )
    context = Context(length_hints)

    def true_length(request: Request) -> int:
        return flat[request.id]

    async def rollout() -> None:
        instances = [
            SimulatedInstance(
                i,
                workload.cost,
                workload.limits(),
                flat.__getitem__,
                speculation=model,
                progress=groups,
                events=emit,
            )
            for i in range(workload.num_instances)
        ]
        loop = RolloutLoop(instances, make_scheduler(spec, settings, context, true_length), context, events=emit)
        for instance in instances:
            await instance.start(loop.on_output)
        enough = wanted_groups if spec.oversample > 1 else None
        num_done = 0
        async for _ in loop.run(workload.groups(), enough_groups=enough):
            num_done += 1
            if progress is not None:
                progress(num_done, wanted_groups)
        for instance in instances:
            await instance.close()

    virtual_time.run(rollout())
    return SimulationResult(
        workload=workload,
        scheduler=scheduler,
        off_policy=spec.off_policy,
        summary=summarizer.summary(),
        wall_s=time.perf_counter() - began_s,
    )


def _fan_out(sinks: list[EventSink]) -> EventSink:
    def emit(event: Event) -> None:
        for sink in sinks:
            sink(event)

    return emit
