# SPDX-License-Identifier: Apache-2.0
"""Simulate one workload under one scheduler: the production rollout loop over simulated instances in virtual time.

A workload with turns (seer.sim.turns) talks to its tools on the same clock.
"""

from __future__ import annotations

import time
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Literal

from seer.context import Context
from seer.errors import ConfigError
from seer.machine.collector import collected_seldom
from seer.metrics.events import EventSink, both
from seer.metrics.summary import Summarizer, Summary
from seer.placement import PlacementConfig
from seer.rollout import RolloutLoop
from seer.scheduling.registry import SchedulerSettings, make_scheduler, parse_scheduler
from seer.scheduling.streamrl import TokenSeconds
from seer.sim import virtual_time
from seer.sim.conversations import Conversations, num_that_fit
from seer.sim.costs import InstanceCost
from seer.sim.instance import SimulatedInstance
from seer.sim.network import ClusterNetwork, NetworkShape, NetworkUse
from seer.sim.pool_tiers import PoolTiers
from seer.sim.speculation import PAPER_TABLE_2, AcceptanceCurve, GroupProgress, SpeculationModel
from seer.sim.turns import WhileWaiting
from seer.sim.workloads import Workload
from seer.spread import Spread
from seer.transfer import TransferEstimate
from seer.types import GROUP_DRAFTS, BudgetRule, DraftMode, Group, GroupResult
from seer.types import budget_rule as rule_of

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
    while_waiting: WhileWaiting | None
    """What happened to the KV of requests that waited for their tools; None without turns."""
    length_hints: Mapping[str, int]
    """What the rollout learned about its prompts, for a later one."""
    network: NetworkUse | None = None
    """What the network carried, where there was one."""


def simulate(
    workload: Workload,
    scheduler: str,
    *,
    speculation: Speculation = "auto",
    settings: SchedulerSettings | None = None,
    drafts: DraftMode | None = None,
    budget_rule: BudgetRule | None = None,
    curve: AcceptanceCurve | None = None,
    length_hints: Mapping[str, int] | None = None,
    spread: Spread | None = None,
    pool: PoolTiers | None = None,
    while_waiting: WhileWaiting = "park",
    network: NetworkShape | None = None,
    events: EventSink | None = None,
    progress: Callable[[int], None] | None = None,
) -> SimulationResult:
    """Roll the workload out to the end; `events` receives every event, `progress` how many groups are complete.

    `drafts` and `budget_rule` take the place of the scheduler's own.
    `pool` bounds the pool's DRAM and puts an SSD below it; without it DRAM holds everything.
    `while_waiting` is what happens to the KV of requests that wait for their tools.
    `network` puts the instances on nodes whose cards the transfers share; without it each has its own full bandwidth.
    `length_hints` are the groups' lengths as learned in an earlier epoch, by the group's number as text.
    `spread` is what earlier rollouts have shown of how far groups outgrow their first finish; this one adds to it.
    """
    workload.check()
    began_s = time.perf_counter()
    spec = parse_scheduler(scheduler)
    enough_groups = len(workload.lengths) if spec.oversample > 1 else None
    if enough_groups is not None and workload.turns:
        raise ConfigError(f"{scheduler} with turns is not simulated", hint="a scheduler that ends every response")
    workload = replace(workload, lengths=workload.lengths * spec.oversample, keys=workload.keys * spec.oversample)
    summarizer = Summarizer(workload.num_instances)
    emit: EventSink = summarizer if events is None else both(summarizer, events)
    mode = drafts or spec.drafts
    model = None if speculation == "off" else _speculation(workload, mode, budget_rule or rule_of(mode), curve)
    if model is not None and model.plain is not None:
        workload = replace(workload, cost=replace(workload.cost, draft_pass_s=model.plain.pass_s))
    nodes = None if network is None else ClusterNetwork(network, workload.cost, workload.num_instances)
    estimate = TransferEstimate(workload.cost.transfer_costs()) if nodes is None else nodes.estimate
    settings = settings or SchedulerSettings(
        chunk_tokens=workload.chunk_tokens,
        placement=PlacementConfig(transfer=estimate if while_waiting == "park" else None),
        token_s=_token_s(workload.cost),
    )
    context = Context(length_hints, spread)
    flat = [length for row in workload.lengths for length in row]
    chosen = make_scheduler(spec, settings, context, lambda request: flat[request.id])
    talks = _conversations(workload, while_waiting) if workload.turns else None

    async def rollout() -> None:
        instances = _make_instances(workload, flat, model, emit, pool=pool, talks=talks, network=nodes)
        loop = RolloutLoop(instances, chosen, context, events=emit, on_turn=talks.on_turn if talks else None)
        num_done = 0
        async for _ in complete_groups(loop, instances, workload.groups(), talks, enough_groups=enough_groups):
            num_done += 1
            if progress is not None:
                progress(num_done)

    with collected_seldom():  # as in a run
        virtual_time.run(rollout())
    summary = summarizer.summary()
    return SimulationResult(
        workload=workload,
        scheduler=scheduler,
        off_policy=spec.off_policy,
        summary=summary,
        while_waiting=while_waiting if talks else None,
        wall_s=time.perf_counter() - began_s,
        length_hints=context.as_length_hints({group.id: group for group in workload.groups()}),
        network=None if nodes is None else nodes.use(summary.makespan_s),
    )


async def complete_groups(
    loop: RolloutLoop,
    instances: Sequence[SimulatedInstance],
    groups: Sequence[Group],
    talks: Conversations | None,
    *,
    enough_groups: int | None = None,
) -> AsyncIterator[GroupResult]:
    """Start the instances, roll the groups out on them, with their tools where they have some, and close them."""
    for instance in instances:
        await instance.start(loop.on_output)
    async for complete in talks.serve(loop) if talks else loop.run(groups, enough_groups=enough_groups):
        yield complete
    for instance in instances:
        await instance.close()


def _conversations(workload: Workload, while_waiting: WhileWaiting) -> Conversations:
    return Conversations(
        workload.groups(),
        workload.turns,
        max_context_tokens=workload.max_context_tokens,
        most_open=num_that_fit(workload) if while_waiting == "hold" else None,
    )


def _token_s(cost: InstanceCost) -> TokenSeconds:
    def token_s(num_requests: int, context_tokens: float) -> float:
        step = cost.step(num_requests)
        return step.base_s + step.per_context_token_s * num_requests * context_tokens

    return token_s


def _speculation(
    workload: Workload, mode: DraftMode, rule: BudgetRule, curve: AcceptanceCurve | None
) -> SpeculationModel | None:
    if mode == "none":
        return None
    plain = workload.drafts.plain if mode == "own" else None
    curve = curve or AcceptanceCurve(workload.drafts.scaled(PAPER_TABLE_2[1]))
    return SpeculationModel(mode in GROUP_DRAFTS, rule, curve, plain)


def _make_instances(
    workload: Workload,
    lengths: list[int],
    model: SpeculationModel | None,
    emit: EventSink,
    *,
    pool: PoolTiers | None,
    talks: Conversations | None,
    network: ClusterNetwork | None,
) -> list[SimulatedInstance]:
    progress = GroupProgress()  # siblings on all instances serve as references
    return [
        SimulatedInstance(
            id,
            workload.cost,
            workload.limits(),
            lengths.__getitem__,
            speculation=model,
            progress=progress,
            events=emit,
            pool=pool,
            turn_end=talks.turn_end if talks else None,
            network=network,
        )
        for id in range(workload.num_instances)
    ]
