# SPDX-License-Identifier: Apache-2.0
"""Instances that share experts meet before they start, and none of them outlives another."""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine
from typing import Any

import pytest

from seer.engine.instance_settings import DataParallelRank
from seer.errors import DeadlineExceeded, InstanceError
from seer.hosting.rank_group import RankEnded, RankGroup, rank_groups

DEADLINE_S = 60.0


class Rank:
    """A member and its process."""

    def __init__(self, id: int, *, node: str | None = None) -> None:
        self.id, self.node = id, node
        self.ended_with: list[tuple[int, str]] = []
        self.ports = iter(range(5000, 6000))
        self.refusal: Exception | None = None
        self.asked = asyncio.Event()
        self.may_answer = asyncio.Event()
        self.may_answer.set()

    async def free_port(self) -> int:
        self.asked.set()
        await self.may_answer.wait()
        if self.refusal is not None:
            raise self.refusal
        return next(self.ports)

    def end_with(self, other: int, reason: str) -> None:
        self.ended_with.append((other, reason))


class Meeting:
    """Ranks 4 to 4 + size - 1 of a fleet; each `arrive` is one start."""

    def __init__(self, size: int = 3, *, start_deadline_s: float = DEADLINE_S, node: str | None = None) -> None:
        self.group = RankGroup(4, size, start_deadline_s=start_deadline_s)
        self.ranks = [Rank(4 + i, node=node) for i in range(size)]

    def arrive(self, *ids: int) -> list[asyncio.Task[DataParallelRank]]:
        return [asyncio.create_task(self.group.meet(self.ranks[id - 4], self.ranks[id - 4])) for id in ids]

    async def run_together(self) -> list[DataParallelRank]:
        return await asyncio.gather(*self.arrive(*(rank.id for rank in self.ranks)))


def run(scenario: Coroutine[Any, Any, None]) -> None:
    async def within_deadline() -> None:
        async with asyncio.timeout(DEADLINE_S):
            await scenario

    asyncio.run(within_deadline())


async def others_have_run() -> None:
    for _ in range(5):
        await asyncio.sleep(0)


@pytest.mark.parametrize(("node", "host"), [(None, "127.0.0.1"), ("10.0.0.7", "10.0.0.7")])
def test_all_ranks_of_a_start_get_the_address_of_the_first_and_another_one_in_the_next_start(
    node: str | None, host: str
) -> None:
    async def scenario() -> None:
        meeting = Meeting(node=node)
        early = meeting.arrive(6, 4)
        await others_have_run()
        assert not any(task.done() for task in early), "rank 1 is not there"
        found = await asyncio.gather(*early, *meeting.arrive(5))
        assert [one.rank for one in found] == [2, 0, 1]
        assert {(one.size, one.address, one.port) for one in found} == {(3, host, 5000)}
        meeting.group.ended(meeting.ranks[0], "killed")
        assert {one.port for one in await meeting.run_together()} == {5001}

    run(scenario())


def test_a_rank_that_ends_ends_the_others_once() -> None:
    async def scenario() -> None:
        meeting = Meeting()
        await meeting.run_together()
        first, second, third = meeting.ranks
        meeting.group.ended(second, "killed")
        meeting.group.ended(first, "ended with another")
        meeting.group.not_started(third, "its process was killed")
        assert [rank.ended_with for rank in meeting.ranks] == [[(5, "killed")], [], [(5, "killed")]]

    run(scenario())


def test_a_rank_that_met_the_others_and_did_not_start_ends_them() -> None:
    async def scenario() -> None:
        meeting = Meeting(2)
        await meeting.run_together()
        meeting.group.not_started(meeting.ranks[0], "no memory")
        assert meeting.ranks[1].ended_with == [(4, "no memory")]

    run(scenario())


def test_nobody_waits_for_a_rank_that_does_not_come() -> None:
    async def scenario() -> None:
        meeting = Meeting()
        waiting = meeting.arrive(4, 6)
        await others_have_run()
        meeting.group.not_started(meeting.ranks[1], "no process could be made\nand a traceback")
        results = await asyncio.gather(*waiting, return_exceptions=True)
        assert [type(result) for result in results] == [RankEnded, RankEnded]
        assert str(results[0]) == "instance 5, with which it shares experts, ended: no process could be made"
        assert [rank.ended_with for rank in meeting.ranks] == [[], [], []], "they were not together"
        assert len(await meeting.run_together()) == 3

    run(scenario())


def test_the_wait_has_a_deadline_that_names_who_is_missing() -> None:
    async def scenario() -> None:
        meeting = Meeting(start_deadline_s=0.01)
        with pytest.raises(DeadlineExceeded, match=r"instance 5 waiting for instances \[4, 6\]"):
            await meeting.arrive(5)[0]
        assert len(await meeting.run_together()) == 3

    run(scenario())


def test_a_rank_that_stops_waiting_is_not_counted_as_there() -> None:
    async def scenario() -> None:
        meeting = Meeting(2)
        (gone,) = meeting.arrive(4)
        await others_have_run()
        gone.cancel()
        await asyncio.gather(gone, return_exceptions=True)
        meeting.group.not_started(meeting.ranks[0], "its start was given up")
        (waiting,) = meeting.arrive(5)
        await others_have_run()
        assert not waiting.done()
        assert (await meeting.arrive(4)[0]).port == (await waiting).port

    run(scenario())


def test_a_rank_that_gives_up_while_a_port_is_asked_for_lets_nobody_start_alone() -> None:
    async def scenario() -> None:
        meeting = Meeting(2)
        meeting.ranks[0].may_answer.clear()
        leaving, staying = meeting.arrive(4, 5)
        await meeting.ranks[0].asked.wait()
        leaving.cancel()
        await asyncio.gather(leaving, return_exceptions=True)
        meeting.group.not_started(meeting.ranks[0], "its start was given up")
        with pytest.raises(RankEnded, match="instance 4, with which it shares experts, ended: its start was given up"):
            await staying
        assert meeting.ranks[1].ended_with == []

    run(scenario())


def test_a_rank_that_has_met_the_others_and_gives_up_then_ends_them() -> None:
    async def scenario() -> None:
        meeting = Meeting(2)
        leaving, staying = meeting.arrive(4, 5)
        while not meeting.group._together:  # noqa: ASYNC110 - a few turns of the event loop
            await asyncio.sleep(0)
        assert not leaving.done(), "it has not heard of it"
        leaving.cancel()
        await asyncio.gather(leaving, return_exceptions=True)
        meeting.group.not_started(meeting.ranks[0], "its start was given up")
        assert (await staying).rank == 1
        assert meeting.ranks[1].ended_with == [(4, "its start was given up")]

    run(scenario())


def test_no_port_is_a_start_that_failed() -> None:
    async def scenario() -> None:
        meeting = Meeting(2)
        meeting.ranks[0].refusal = InstanceError("an instance that dials in cannot share experts")
        with pytest.raises(InstanceError, match="dials in"):
            await meeting.arrive(4)[0]

    run(scenario())


def test_a_port_that_does_not_come_is_not_waited_for_beyond_the_deadline() -> None:
    async def scenario() -> None:
        meeting = Meeting(2, start_deadline_s=0.01, node="10.0.0.7")
        meeting.ranks[0].may_answer.clear()
        with pytest.raises(DeadlineExceeded, match=r"instance 4 waiting for a free port at 10\.0\.0\.7"):
            await meeting.arrive(4)[0]

    run(scenario())


@pytest.mark.parametrize("is_there", [True, False])
def test_nobody_waits_for_a_rank_that_never_starts_again(is_there: bool) -> None:
    async def scenario() -> None:
        meeting = Meeting()
        waiting = meeting.arrive(4, 6)
        if is_there:
            await others_have_run()
        meeting.group.leave(meeting.ranks[1], "its log cannot be written")
        meeting.group.leave(meeting.ranks[0], "it waited for that one")  # which says less
        for task in [*waiting, *meeting.arrive(4)]:
            with pytest.raises(RankEnded, match=r"instance 5, .* ended: its log cannot be written"):
                await task

    run(scenario())


def test_instances_in_a_row_are_a_group() -> None:
    assert rank_groups(8, 2, 1, start_deadline_s=1.0) == [None, None]

    async def scenario() -> None:
        groups = rank_groups(4, 4, 2, start_deadline_s=DEADLINE_S)
        assert groups[0] is groups[1] is not groups[2]
        assert groups[2] is groups[3] is not None
        last = groups[2]
        found = await asyncio.gather(*(last.meet(rank, rank) for rank in (Rank(6), Rank(7))))
        assert [one.rank for one in found] == [0, 1]

    run(scenario())
