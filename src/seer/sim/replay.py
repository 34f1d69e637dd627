# SPDX-License-Identifier: Apache-2.0
"""Run a recorded rollout again: the same lengths, on the same cluster, under the same or another scheduler.

A recording is an event log (`seer.metrics.jsonl`). Its events contain the requests and their lengths; its header
describes the cluster.

Invariants
  1. Every number of a recording is within its range, and its events follow the rules of `seer.metrics.run_events`, or
     it is refused. So a replay takes no more memory than a simulation that the command line allows.
  2. A simulated recording, replayed under the scheduler it was recorded with, gives the same plan: the same chunks,
     started in the same order, at the same times, on the same instances.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, Literal

import msgspec
from msgspec import Meta

from seer.errors import InputError
from seer.metrics.events import Ended, Event, Queued, Started
from seer.metrics.jsonl import read_header
from seer.metrics.run_events import read_run_events
from seer.ranges import (
    Count,
    Probability,
    SecondsOrZero,
    Seed,
    SequenceSlots,
    Share,
    SimulatedGpus,
    SimulatedInstances,
    check,
)
from seer.scheduling.registry import parse_scheduler
from seer.sim.chunk_limit import refuse_endless
from seer.sim.cluster import Speculation, simulate
from seer.sim.costs import GPUS, MODELS, InstanceCost
from seer.sim.draft_model import DraftModel
from seer.sim.turns import RequestTurns, WhileWaiting
from seer.sim.workloads import Workload
from seer.types import FinishReason


class _Cost(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The numbers of `InstanceCost`; its model and GPU are written by name."""

    num_gpus: SimulatedGpus
    expert_parallel: bool
    overhead_s: SecondsOrZero
    slowdown: Annotated[float, Meta(gt=0, le=1e6)]
    memory_share: Share
    speculation_overhead_s: SecondsOrZero
    draft_s_per_token: SecondsOrZero
    draft_pass_s: SecondsOrZero
    verify_context_share: Probability


class _Cluster(msgspec.Struct, frozen=True):
    """The part of a header that describes the cluster."""

    model: str
    gpu: str
    cost: _Cost
    num_instances: SimulatedInstances
    max_tokens: Count
    chunk_tokens: Count
    max_num_seqs: SequenceSlots
    drafts: DraftModel = DraftModel()


class _Metadata(msgspec.Struct, frozen=True, omit_defaults=True):
    workload: str
    scheduler: str
    seed: Seed
    speculation: Literal["auto", "off"]
    cluster: _Cluster
    while_waiting: WhileWaiting = "park"
    turns: tuple[RequestTurns, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class Recording:
    """A run, as read from an event log."""

    workload: Workload
    scheduler: str
    speculation: Speculation
    while_waiting: WhileWaiting
    started: tuple[Started, ...]
    """The recorded plan."""


def run_metadata(
    workload: Workload, scheduler: str, speculation: Speculation, seed: int, while_waiting: WhileWaiting = "park"
) -> dict[str, Any]:
    """The header fields that a replay needs."""
    cost = workload.cost
    metadata = _Metadata(
        workload=workload.name,
        scheduler=scheduler,
        seed=seed,
        speculation=speculation,
        cluster=_Cluster(
            model=cost.model.name,
            gpu=cost.gpu.name.lower(),
            cost=_Cost(**{name: getattr(cost, name) for name in _Cost.__struct_fields__}),
            num_instances=workload.num_instances,
            max_tokens=workload.max_tokens,
            chunk_tokens=workload.chunk_tokens,
            max_num_seqs=workload.max_num_seqs,
            drafts=workload.drafts,
        ),
        while_waiting=while_waiting,
        turns=workload.turns,
    )
    content: dict[str, Any] = msgspec.to_builtins(metadata)
    return content


def read_recording(path: Path) -> Recording:
    """Read an event log."""
    try:
        metadata = msgspec.convert(read_header(path).metadata, _Metadata)
    except msgspec.ValidationError as error:
        raise InputError(f"{path}: the header does not describe a simulated run: {error}") from error
    parse_scheduler(metadata.scheduler)
    queued: list[Queued] = []
    lengths: dict[int, int] = {}
    started: list[Started] = []
    for event in read_run_events(path, metadata.cluster.num_instances):
        if isinstance(event, Queued):
            queued.append(event)
        elif isinstance(event, Started):
            started.append(event)
        elif isinstance(event, Ended):
            if event.finish_reason not in (FinishReason.STOP.value, FinishReason.LENGTH.value):
                raise InputError(
                    f"{path}: request {event.request} was {event.finish_reason}, its full length is unknown",
                    hint="replay a run in which every request ended with stop or length",
                )
            most = metadata.cluster.max_tokens
            if not 1 <= event.num_generated <= most:
                raise InputError(
                    f"{path}: request {event.request} generated {event.num_generated} tokens", hint=f"1 to {most:,}"
                )
            lengths[event.request] = event.num_generated
    try:
        refuse_endless(lengths.values(), metadata.cluster.chunk_tokens, len(started))
    except InputError as error:
        raise InputError(f"{path}: {error}", hint=error.hint) from None
    return Recording(
        workload=_workload(path, metadata, queued, lengths),
        scheduler=metadata.scheduler,
        speculation=metadata.speculation,
        while_waiting=metadata.while_waiting,
        started=tuple(started),
    )


def replay(recording: Recording, scheduler: str | None = None) -> list[Started]:
    """Run it again and return the new plan."""
    plan: list[Started] = []

    def keep(event: Event) -> None:
        if isinstance(event, Started):
            plan.append(event)

    simulate(
        recording.workload,
        scheduler or recording.scheduler,
        speculation=recording.speculation,
        while_waiting=recording.while_waiting,
        events=keep,
    )
    return plan


def _workload(path: Path, metadata: _Metadata, queued: list[Queued], lengths: dict[int, int]) -> Workload:
    groups: dict[int, list[int]] = {}
    for event in queued:
        check(event.num_prompt_tokens, Count, f"{path}: num_prompt_tokens of request {event.request}")
        if event.request not in lengths:
            raise InputError(f"{path}: request {event.request} never ended", hint="was the run interrupted?")
        groups.setdefault(event.group, []).append(lengths[event.request])
    if not groups:
        raise InputError(f"{path} has no requests", hint="record a run to its end")
    cluster = metadata.cluster
    if cluster.model not in MODELS or cluster.gpu not in GPUS:
        raise InputError(f"{path}: there is no cost model for {cluster.model} on {cluster.gpu}")
    return Workload(
        name=metadata.workload,
        lengths=tuple(map(tuple, groups.values())),
        max_tokens=cluster.max_tokens,
        prompt_tokens=queued[0].num_prompt_tokens,
        cost=InstanceCost(model=MODELS[cluster.model], gpu=GPUS[cluster.gpu], **msgspec.structs.asdict(cluster.cost)),
        num_instances=cluster.num_instances,
        chunk_tokens=cluster.chunk_tokens,
        max_num_seqs=cluster.max_num_seqs,
        drafts=cluster.drafts,
        turns=_turns(path, metadata, [length for row in groups.values() for length in row]),
    )


def _turns(path: Path, metadata: _Metadata, lengths: list[int]) -> tuple[RequestTurns, ...]:
    """The turns of the header; refused where they are not those of the events."""
    if metadata.turns and [one.num_generated for one in metadata.turns] != lengths:
        raise InputError(f"{path}: the header's turns are not those of its requests")
    if not all(one.is_whole for one in metadata.turns):
        raise InputError(f"{path}: the header has turns without tokens, or not an answer and a time for each turn")
    return metadata.turns
