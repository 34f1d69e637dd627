"""Brings lost instances back, a limited number of times, and says when none is left.

Knows nothing of rollouts: whoever drives is told `lost` and `back`, and hands the news to its loop.

Invariants
  1. Each loss leads to one `lost`, and to at most one `back`, in that order.
  2. When no instance is up and none is being brought back, `given_up` is called, once.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Protocol

from seer.errors import InstanceError, SeerError


class Restartable(Protocol):
    """What is supervised."""

    @property
    def id(self) -> int:
        """Dense within the fleet."""

    @property
    def is_up(self) -> bool:
        """Whether it takes chunks."""

    async def restart(self) -> None:
        """Bring it back after a loss."""


class Supervisor:
    """Restarts instances within a limit."""

    def __init__(
        self,
        *,
        max_restarts: int,
        lost: Callable[[int, str], None],
        back: Callable[[int], None],
        given_up: Callable[[SeerError], None],
    ) -> None:
        self._max_restarts = max_restarts
        self._lost = lost
        self._back = back
        self._given_up = given_up
        self._instances: list[Restartable] = []
        self._num_restarts: dict[int, int] = {}
        self._restarting: dict[int, asyncio.Task[None]] = {}
        self._is_over = False

    def watch(self, instances: list[Restartable]) -> None:
        """The fleet; `on_lost` of each is this supervisor's."""
        self._instances = instances

    def on_lost(self, instance: int, reason: str) -> None:
        """An instance went down."""
        self._lost(instance, reason)
        if not self._is_over:
            self._restarting[instance] = asyncio.create_task(self._restart(instance, reason))

    async def close(self) -> None:
        """Stop bringing instances back."""
        self._is_over = True
        tasks = list(self._restarting.values())
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    async def _restart(self, instance: int, reason: str) -> None:
        is_back = False
        while not is_back and self._num_restarts.get(instance, 0) < self._max_restarts:
            self._num_restarts[instance] = self._num_restarts.get(instance, 0) + 1
            try:
                await self._instances[instance].restart()
                is_back = True
            except SeerError as error:
                reason = str(error)
        del self._restarting[instance]
        if is_back:
            self._back(instance)
        else:
            self._check_hope(f"the last to go was instance {instance}: {reason}")

    def _check_hope(self, last: str) -> None:
        if self._is_over or self._restarting or any(instance.is_up for instance in self._instances):
            return
        self._is_over = True
        self._given_up(
            InstanceError(
                f"no instance is left; {last}",
                hint=f"each was restarted up to {self._max_restarts} times; see the instances' logs",
            )
        )
