# SPDX-License-Identifier: Apache-2.0
"""The commands that stand until a newer one of their kind: weights, the run. A new process gets them again.

Invariants
  1. There is one command of each kind: the newest.
  2. After `repeat` the process has carried out the newest of every kind, also of those that came during it.
  3. A command that failed while a newer one took its place fails nothing, as long as the process is up.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from typing import TypeVar

from seer.errors import InstanceError
from seer.hosting.messages import Command

Kind = TypeVar("Kind", bound=Command)


class StandingCommands:
    """Of one instance; they outlive its processes."""

    def __init__(self) -> None:
        self._newest: dict[type, Command] = {}

    def keep(self, command: Command) -> None:
        """It stands from now on, in the place of one of its kind."""
        self._newest[type(command)] = command

    def newest(self, kind: type[Kind]) -> Kind | None:
        """The command of this kind; None if none was given."""
        found = self._newest.get(kind)
        return found if isinstance(found, kind) else None

    def take_back(self, kind: type[Command], earlier: Command | None) -> None:
        """The newest of this kind stands no longer, but the one before it; with None, none does."""
        if earlier is not None:
            self._newest[kind] = earlier
        else:
            self._newest.pop(kind, None)

    def take_over(self, others: StandingCommands) -> None:
        """Stand as those of another instance do."""
        self._newest = dict(others._newest)

    async def repeat(self, call: Callable[[Command], Awaitable[None]], is_up: Callable[[], bool]) -> None:
        """`call` every command once, and those again that change during the calls."""
        done: dict[type, Command] = {}
        while any(done.get(kind) != newest for kind, newest in self._newest.items()):
            for kind in list(self._newest):
                command = self._newest.get(kind)
                if command is None or done.get(kind) == command:
                    continue
                try:
                    await call(command)
                except InstanceError:
                    if not is_up() or self._newest.get(kind) == command:
                        raise
                    continue  # a newer one of its kind has taken its place, or it was taken back
                done[kind] = command
