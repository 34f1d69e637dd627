# SPDX-License-Identifier: Apache-2.0
"""The scheduler protocol: choose which request runs next, on which instance, and for how many tokens.

Pure: no clock, no I/O, no randomness. So the simulator and production run the same code, and any plan can be replayed
from a trace. The rollout loop calls a scheduler for every change of a request. A scheduler never changes a request.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Protocol

import msgspec

from seer.buffer import Request
from seer.placement import Fleet

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


class Scheduler(Protocol):
    """Decides; the rollout loop acts."""

    def admit(self, requests: Sequence[Request], fleet: Fleet) -> None:
        """Queue new requests. Siblings are adjacent, each group's probe first."""

    def requeue(self, request: Request) -> None:
        """Queue a request again: its chunk ended, or its instance was lost."""

    def finished(self, request: Request) -> None:
        """The request has ended, for any finish reason."""

    def next(self, fleet: Fleet) -> Assignment | None:
        """The next assignment, or None if nothing can start now. Its request leaves the queue."""
