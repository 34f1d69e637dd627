# SPDX-License-Identifier: Apache-2.0
"""Instances that share the experts of one model: its data-parallel ranks. They start together and end together.

Each is an instance like any other, with requests and KV memory of its own. But in every step they exchange tokens, so
one that is alone would wait for the others in the middle of a step.

Invariants
  1. All ranks that run together were given one address, whose port was asked for at this start.
  2. A rank that ends, or does not start, ends the others that it met, once.
  3. A rank that fails to come, or never will, ends the wait of the others at once: it calls `not_started` or `leave`.

Waits for                                    unblocked by
  a port, from the machine of the first rank   it, start_deadline_s
  the processes of the other ranks             them, one of them that does not come, start_deadline_s
"""

from __future__ import annotations

import asyncio
from typing import Protocol

from seer.engine.instance_settings import DataParallelRank
from seer.errors import DeadlineExceeded, InstanceError
from seer.machine.addresses import LOOPBACK


class RankEnded(InstanceError):  # noqa: N818 - reads as what it is
    """An instance ended because another one did, which says why."""


class RankProcess(Protocol):
    """The process of a rank, as far as its group is concerned."""

    @property
    def node(self) -> str | None:
        """The address of its machine; None for the driver's own."""

    async def free_port(self) -> int:
        """A port of its machine that nothing listens on."""


class Member(Protocol):
    """An instance of the group."""

    @property
    def id(self) -> int:
        """Index within the fleet."""

    def end_with(self, other: int, reason: str) -> None:
        """End, because this other member has."""


class _Meeting:
    """One start of all ranks."""

    def __init__(self) -> None:
        self.come: dict[int, Member] = {}
        self.first_at: tuple[str, int] | None = None
        self.place: asyncio.Future[tuple[str, int]] = asyncio.get_running_loop().create_future()
        # Read here, because asyncio complains of an exception that was never read.
        self.place.add_done_callback(lambda place: place.cancelled() or place.exception())


class RankGroup:
    """The instances `first` to `first + size - 1` of a fleet."""

    def __init__(self, first: int, size: int, *, start_deadline_s: float) -> None:
        self.ids = range(first, first + size)
        """Of its instances."""
        self._deadline_s = start_deadline_s
        self._next: _Meeting | None = None
        self._together: list[Member] = []  # all of them, or none
        self._over: RankEnded | None = None

    async def meet(self, member: Member, process: RankProcess) -> DataParallelRank:
        """Wait until the processes of all ranks are there; returns where this one finds the others.

        Whoever gives up waiting calls `not_started`.
        """
        is_first = member.id == self.ids.start
        missing = f"a free port at {process.node or LOOPBACK}"
        try:
            async with asyncio.timeout(self._deadline_s):
                own = (process.node or LOOPBACK, await process.free_port()) if is_first else None
                if self._over is not None:
                    raise self._over
                meeting = self._next = self._next or _Meeting()
                meeting.come[member.id] = member
                meeting.first_at = own or meeting.first_at
                self._begin_if_all_have_come(meeting)
                missing = f"instances {sorted({*self.ids} - meeting.come.keys())}, with which it shares experts"
                host, port = await asyncio.shield(meeting.place)
        except TimeoutError:
            raise DeadlineExceeded(f"instance {member.id} waiting for {missing}", self._deadline_s) from None
        return DataParallelRank(rank=member.id - self.ids.start, size=len(self.ids), address=host, port=port)

    def _begin_if_all_have_come(self, meeting: _Meeting) -> None:
        if len(meeting.come) == len(self.ids):
            assert meeting.first_at is not None, "the first has come"
            self._next = None
            self._together = list(meeting.come.values())
            meeting.place.set_result(meeting.first_at)

    def not_started(self, member: Member, reason: str) -> None:
        """A member did not start: before it met the others, or after. It may come again."""
        if self._together:
            self.ended(member, reason)
        else:
            self._cancel_meeting(RankEnded(because(member.id, reason)))

    def leave(self, member: Member, reason: str) -> None:
        """A member never starts again, and so none of the others does."""
        self._over = self._over or RankEnded(because(member.id, reason))
        self._cancel_meeting(self._over)

    def _cancel_meeting(self, why: RankEnded) -> None:
        meeting, self._next = self._next, None
        if meeting is not None:
            meeting.place.set_exception(why)

    def ended(self, member: Member, reason: str) -> None:
        """A member that had met the others has ended: they end too."""
        together, self._together = self._together, []
        for other in together:
            if other is not member:
                other.end_with(member.id, reason)


def rank_groups(first: int, num: int, size: int, *, start_deadline_s: float) -> list[RankGroup] | list[None]:
    """The group of each of `num` instances with the ids from `first` on, `size` in a row; None where each is alone."""
    if size == 1:
        return [None] * num
    assert num % size == 0, f"{num} instances in groups of {size}"
    groups = [RankGroup(i, size, start_deadline_s=start_deadline_s) for i in range(first, first + num, size)]
    return [groups[i // size] for i in range(num)]


def because(member: int, reason: str) -> str:
    """Why an instance ended with another: one line, whatever the log of the other has."""
    return f"instance {member}, with which it shares experts, ended: {reason.partition(chr(10))[0]}"
