# SPDX-License-Identifier: Apache-2.0
"""Forced lengths on a fleet whose instances come and go during a run."""

from __future__ import annotations

from collections.abc import Callable

from seer.engine.base import Instance
from seer.engine.forced import ForcedLengths
from seer.rollout import RolloutLoop


class ForcedFleet:
    """A rollout loop, as its fleet calls it: a new instance gets forced lengths too."""

    def __init__(self, loop: RolloutLoop, forced: list[ForcedLengths], length_of: Callable[[int], int]) -> None:
        """`forced` are the wrapped instances by id; new ones are appended."""
        self._loop, self._forced, self._length_of = loop, forced, length_of

    def add_instance(self, instance: Instance) -> None:
        """Wrap it and pass it on."""
        one = ForcedLengths(instance, self._length_of)
        one.attach(self._loop.on_output)
        self._forced.append(one)
        self._loop.add_instance(one)

    def retire_instance(self, instance: int) -> None:
        """Passed on."""
        self._loop.retire_instance(instance)

    def lose_instance(self, instance: int) -> None:
        """Passed on."""
        self._loop.lose_instance(instance)

    def rejoin_instance(self, instance: int) -> None:
        """Passed on."""
        self._loop.rejoin_instance(instance)
