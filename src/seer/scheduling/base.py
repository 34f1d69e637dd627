"""What a scheduler is: it chooses which request runs next, where, and for how many tokens.

Pure: no clock, no I/O, no hidden randomness, so that simulation and production run the same lines and any plan can be
replayed from a trace. A scheduler is told of every change and keeps what order it needs; it never writes a request.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Protocol

import msgspec

from seer.buffer import Request
from seer.placement import Fleet

TrueLength = Callable[[Request], int]
"""How long a response will be: what only an oracle knows."""


class Assignment(msgspec.Struct, frozen=True, gc=False):
    """Run this request there, for at most so many tokens."""

    request: Request
    instance: int
    max_tokens: int
    load_kv: bool
    num_blocks: int
    """KV promised to it."""
    overcommit: bool = False
    """The engine, not the scheduler, sees to memory (it may preempt)."""


class Scheduler(Protocol):
    """Decides; the rollout loop carries out."""

    def admit(self, requests: Sequence[Request], fleet: Fleet) -> None:
        """These requests have arrived and wait; siblings are adjacent, each group's probe first."""

    def requeue(self, request: Request) -> None:
        """The request waits again: its chunk ended, or its instance was lost."""

    def finished(self, request: Request) -> None:
        """The request has ended (by itself if its reason is stop or length)."""

    def next(self, fleet: Fleet) -> Assignment | None:
        """The next thing to do, or None if nothing can be started now. Its request counts as taken."""
