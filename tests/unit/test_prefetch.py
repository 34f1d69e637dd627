# SPDX-License-Identifier: Apache-2.0
"""Instances are asked for the KV of the requests that run next: once, and with the tokens that name it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any, cast

from builders import a_buffer, a_fleet, a_group, a_scheduler, requests_of
from seer.buffer import Request
from seer.context import Context
from seer.engine.fake import FakeInstance
from seer.fleet import Fleet
from seer.placement import PlacementConfig
from seer.prefetch import Prefetcher
from seer.scheduling.base import LooksAhead
from seer.scheduling.look_ahead import Upcoming
from seer.scheduling.registry import SchedulerSettings, make_scheduler, parse_scheduler
from seer.transfer import TransferCosts, TransferEstimate
from seer.types import Chunk, ChunkEnd, ChunkOutput, TokenSpan


class Asked(FakeInstance):
    """Notes the hints it gets."""

    def __init__(self, id: int) -> None:
        super().__init__(id)
        self.chunks: list[Chunk] = []

    def prefetch(self, chunk: Chunk) -> None:
        self.chunks.append(chunk)


class Naming:
    """Stands for a scheduler that knows who runs next."""

    def __init__(self, *named: Upcoming) -> None:
        self.named = list(named)

    def upcoming(self, fleet: Fleet) -> Sequence[Upcoming]:
        return self.named


def a_request() -> Request:
    (request, *_) = requests_of(a_group(prompt=2))
    request.group = cast(Any, request.group).__class__(
        id=0, num_requests=4, num_prompt_tokens=2, sampling=request.group.sampling, prompt=[5, 6]
    )
    request.spans.append(TokenSpan([7, 8, 9], [0.0] * 3, 3))
    request.num_generated = 3
    return request


def test_an_instance_is_asked_once_for_what_a_request_has() -> None:
    request, instances = a_request(), [Asked(0), Asked(1)]
    prefetcher = Prefetcher(cast(Any, Naming(Upcoming(request, 1))), instances, weights_version=3)
    for _ in range(3):
        prefetcher.look_ahead(a_fleet())
    assert [len(one.chunks) for one in instances] == [0, 1]
    chunk = instances[1].chunks[0]
    assert (chunk.token_ids(), chunk.weights_version) == ([5, 6, 7, 8, 9], 3)
    request.num_generated = 4  # it has run since, and waits again
    prefetcher.look_ahead(a_fleet())
    assert len(instances[1].chunks) == 2


def test_instances_and_schedulers_that_know_nothing_of_it_are_left_alone() -> None:
    Prefetcher(cast(Any, Naming(Upcoming(a_request(), 0))), [FakeInstance(0)], 0).look_ahead(a_fleet(1))
    asked = Asked(0)
    Prefetcher(a_scheduler("verl"), [asked], 0).look_ahead(a_fleet(1))
    assert asked.chunks == []


def test_a_conversation_is_named_when_its_tool_has_answered_and_not_before() -> None:
    costs = TransferCosts(prefetch_tokens=10_000)
    settings = SchedulerSettings(placement=PlacementConfig(transfer=TransferEstimate(costs)))
    scheduler = make_scheduler(parse_scheduler("seer"), settings, Context(), lambda request: request.max_tokens)
    assert isinstance(scheduler, LooksAhead)
    group = replace(a_group(size=1, prompt=100), has_turns=True, max_context_tokens=2000)
    buffer, fleet = a_buffer(group), a_fleet()
    request = buffer[0]
    scheduler.admit([request], fleet)
    plan = scheduler.next(fleet)
    assert plan is not None
    chunk = buffer.start(request, plan.instance, plan.max_tokens, plan.load_kv, 0.0)
    buffer.apply(ChunkOutput(0, chunk.attempt, plan.instance, 30, end=ChunkEnd.STOP), 1.0)
    scheduler.away(request)
    assert list(scheduler.upcoming(fleet)) == []
    buffer.answer(request, None, 5, 2.0)
    scheduler.requeue(request)
    assert list(scheduler.upcoming(fleet)) == [Upcoming(request, plan.instance)]
