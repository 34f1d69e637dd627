# SPDX-License-Identifier: Apache-2.0
"""While sequence slots are scarce, who leaves one to a request that may become far longer."""

from __future__ import annotations

from dataclasses import dataclass, field

import pytest

from builders import a_group, end
from seer.buffer import Request, RequestBuffer
from seer.context import Context
from seer.fleet import Fleet
from seer.placement import PlacementConfig
from seer.scheduling.memory_or_slot import MemoryOrSlotOrdering
from seer.scheduling.seer import Seer
from seer.transfer import TransferEstimate
from seer.types import InstanceLimits

MAX_TOKENS = 4096


@dataclass
class World:
    """Two instances of two slots each, full with a group of five that is then known to be short; others wait."""

    kv_blocks: int = 4096
    max_model_len: int = 1 << 20
    has_pool: bool = True
    short: int = 100
    """Tokens of the group's first response."""
    context: Context = field(default_factory=Context)

    def __post_init__(self) -> None:
        limits = InstanceLimits(
            kv_blocks=self.kv_blocks,
            block_size=16,
            max_num_seqs=2,
            max_model_len=self.max_model_len,
        )
        self.fleet = Fleet([limits, limits])
        pool = TransferEstimate() if self.has_pool else None
        self.scheduler = Seer(self.context, max_chunk_tokens=512, placement=PlacementConfig(transfer=pool))
        first, *self.running = RequestBuffer().admit([a_group(0, 5, max_tokens=MAX_TOKENS)], 0.0)
        self.scheduler.admit(self.running, self.fleet)
        while self.start() is not None:
            pass
        for request in self.running:
            request.num_generated = 10
        end(first, self.short)
        self.context.observe_finished(first, [first, *self.running])
        self.scheduler.finished(first)

    def start(self) -> Request | None:
        """Start the first that the scheduler lets run."""
        plan = self.scheduler.next(self.fleet)
        if plan is None:
            return None
        self.fleet.promise(plan.request, plan.instance, plan.num_blocks, shared_blocks=plan.shared_blocks)
        plan.request.instance, plan.request.chunk_remaining = plan.instance, plan.max_tokens
        return plan.request

    def wait(self, *, id: int = 7, num_prompt_tokens: int = 8) -> Request:
        """A request of a group of unknown length comes, and finds no room."""
        group = a_group(id, 1, max_tokens=MAX_TOKENS, prompt=num_prompt_tokens)
        request = RequestBuffer().admit([group], 0.0)[0]
        request.id = 90 + id
        self.scheduler.admit([request], self.fleet)
        assert self.scheduler.next(self.fleet) is None, "it was to wait"
        return request

    def yielded(self) -> list[Request]:
        """Who is asked to leave when all leases run low."""
        return list(self.scheduler.renew(self.running, self.fleet).parked)

    def leave(self, request: Request) -> None:
        """It has left its instance, and waits."""
        self.fleet.give_back(request)
        request.instance = None
        self.scheduler.requeue(request)


def test_a_request_of_a_short_group_leaves_its_slot_to_one_of_unknown_length() -> None:
    world = World()
    world.running[2].num_generated = 30  # needs least: the group has 100 tokens
    for request in (world.running[0], world.running[1], world.running[3]):
        request.num_generated = 1
    waiting = world.wait()
    (gone,) = world.yielded()
    assert gone is world.running[2]
    assert not world.yielded(), "one at a time: its slot is on its way"
    world.leave(gone)
    assert world.start() is waiting


def test_the_next_one_leaves_when_the_first_slot_is_taken() -> None:
    world = World()
    first = world.wait()
    (gone,) = world.yielded()
    world.leave(gone)
    assert world.start() is first
    world.running.remove(gone)
    world.wait(id=8)
    (second,) = world.yielded()
    assert second is not gone


def test_requests_of_like_needs_do_not_take_turns() -> None:
    world = World(short=MAX_TOKENS // 2 + 200)
    world.wait()
    assert not world.yielded()


def test_nobody_leaves_while_a_slot_is_free() -> None:
    world = World()
    world.wait()
    world.fleet.give_back(world.running.pop())  # it has just ended
    assert not world.yielded()


@pytest.mark.parametrize("has_pool", [True, False])
def test_without_a_pool_nobody_leaves(has_pool: bool) -> None:
    world = World(has_pool=has_pool)
    world.wait()
    assert bool(world.yielded()) is has_pool


def test_where_memory_is_scarce_it_decides_who_leaves() -> None:
    world = World(kv_blocks=10)  # two leases
    needs_least, *others = world.running
    (neighbour,) = (one for one in others if one.instance == needs_least.instance)
    needs_least.num_generated, neighbour.num_generated = 30, 90  # the neighbour may need the fewest of 800 tokens
    world.wait()
    assert list(world.scheduler.renew([needs_least], world.fleet).parked) == [neighbour]


@pytest.mark.parametrize(("prompt", "fits"), [(200, True), (290, False)])
def test_nobody_leaves_an_instance_for_a_request_that_is_too_long_for_it(prompt: int, fits: bool) -> None:
    world = World(max_model_len=300)
    world.wait(num_prompt_tokens=prompt)
    assert bool(world.yielded()) is fits


@pytest.mark.parametrize(("prompt", "fits"), [(16 * 4000, True), (16 * 4096, False)])
def test_nobody_leaves_for_a_request_that_then_lacks_memory(prompt: int, fits: bool) -> None:
    world = World()
    world.wait(num_prompt_tokens=prompt)
    assert bool(world.yielded()) is fits


def end_at_the_limit(context: Context) -> Request:
    """Many responses do; returns the last of them."""
    requests = [RequestBuffer().admit([a_group(100 + at, 1, max_tokens=MAX_TOKENS)], 0.0)[0] for at in range(20)]
    for request in requests:
        end(request, MAX_TOKENS)
        context.observe_finished(request, [request])
    return requests[-1]


def let_the_limit_bind(world: World) -> None:
    """Many responses of others have ended at their limit; the scheduler hears of the last."""
    world.scheduler.finished(end_at_the_limit(world.context))
    assert world.context.limit_binds


@pytest.mark.parametrize("binds", [False, True])
def test_where_the_limit_binds_one_that_is_far_leaves_its_slot_to_one_of_a_short_group(binds: bool) -> None:
    world = World()
    if binds:
        let_the_limit_bind(world)
    world.running[2].num_generated = MAX_TOKENS - 1000
    (waiting,) = RequestBuffer().admit([a_group(0, 1, max_tokens=MAX_TOKENS)], 0.0)
    waiting.id = 99
    world.scheduler.admit([waiting], world.fleet)
    assert world.scheduler.next(world.fleet) is None
    assert world.yielded() == ([world.running[2]] if binds else [])


def test_where_the_limit_binds_those_that_have_generated_least_run_first() -> None:
    context = Context()
    ordering = MemoryOrSlotOrdering(context)
    ordering.memory_is_scarce = False
    first, *short = RequestBuffer().admit([a_group(0, 3, max_tokens=MAX_TOKENS)], 0.0)
    (far,) = RequestBuffer().admit([a_group(1, 1, max_tokens=MAX_TOKENS)], 0.0)
    far.id, far.num_generated = 50, MAX_TOKENS // 2
    end(first, 20)
    context.observe_finished(first, [first, *short])
    ordering.admit([*short, far])
    ordering.finished(first)
    assert ordering.peek() is far, "the others are expected to need 20 tokens"
    ordering.finished(end_at_the_limit(context))
    assert [ordering.pop() for _ in range(3)] == [*short, far]


def test_a_group_with_a_length_hint_keeps_its_estimate_where_the_limit_binds() -> None:
    context = Context({"known": 300})
    hinted, unknown = (
        RequestBuffer().admit([a_group(number, 1, max_tokens=MAX_TOKENS, key=key)], 0.0)[0]
        for number, key in ((0, "known"), (1, None))
    )
    end_at_the_limit(context)
    ordering = MemoryOrSlotOrdering(context)
    assert ordering.slot_tokens(hinted) == 300
    unknown.num_generated = 96
    assert ordering.slot_tokens(unknown) == 4000
