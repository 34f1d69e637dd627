# SPDX-License-Identifier: Apache-2.0
"""The scheduler protocol: choose which request runs next, on which instance, how far, and which one stays or leaves.

Pure: no clock, no I/O, no randomness. So the simulator and production run the same code, and any plan can be replayed
from a trace. The rollout loop calls a scheduler for every change of a request. A scheduler never changes a request.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple, Protocol, runtime_checkable

import msgspec

from seer.buffer import Request
from seer.fleet import Fleet
from seer.scheduling.look_ahead import Upcoming

TrueLength = Callable[[Request], int]
"""The final length of a response. Only oracles use it."""


class Assignment(msgspec.Struct, frozen=True, gc=False):
    """Run this request on this instance, for at most `max_tokens` tokens."""

    request: Request
    instance: int
    max_tokens: int
    load_kv: bool
    num_blocks: int
    """KV blocks reserved for it."""
    overcommit: bool = False
    """Whether the reservation may exceed the instance's memory: the engine preempts when it runs out."""
    shared_blocks: int = 0
    """Of the reserved blocks, full ones of its prompt: siblings on that instance have the same."""

    is_lease: bool = False
    """Whether the scheduler may extend it while it runs."""


class Extension(msgspec.Struct, frozen=True, gc=False):
    """Let a running request stay for more tokens."""

    request: Request
    num_tokens: int
    num_blocks: int
    """KV blocks reserved for it from now on, in all."""


class Renewal(NamedTuple):
    """Which running requests stay longer, and which leave at once. The lease of any other one goes on, or ends."""

    extended: Sequence[Extension] = ()
    parked: Sequence[Request] = ()


class Scheduler(Protocol):
    """Decides; the rollout loop acts."""

    def admit(self, requests: Sequence[Request], fleet: Fleet) -> None:
        """Queue new requests. Siblings are adjacent, each group's probe first."""

    def requeue(self, request: Request) -> None:
        """Queue a request again: its chunk ended, or its instance was lost."""

    def away(self, request: Request) -> None:
        """Its chunk ended, and it waits for its environment: it is queued again, or it ends, later."""

    def finished(self, request: Request) -> None:
        """The request has ended, for any finish reason."""

    def forget(self, family: int) -> None:
        """All requests of a family of groups have ended, and no more come."""

    def renew(self, low: Sequence[Request], fleet: Fleet) -> Renewal:
        """Decide about running requests; `low` are those whose lease runs low. Called before every `next`."""

    def next(self, fleet: Fleet) -> Assignment | None:
        """The next assignment, or None if nothing can start now. Its request leaves the queue."""


@runtime_checkable
class LooksAhead(Protocol):
    """A scheduler that knows which waiting requests run next."""

    def upcoming(self, fleet: Fleet) -> Sequence[Upcoming]:
        """Those whose KV is to be in DRAM by then, in order. Changes nothing."""
