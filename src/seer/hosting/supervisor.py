# SPDX-License-Identifier: Apache-2.0
"""Restarts lost instances, at most `max_restarts` times each, and reports when none is left.

Knows nothing of rollouts: it calls `lost` and `back`, and the fleet passes them to the rollout loop.

Invariants
  1. Each loss leads to one `lost`, and to at most one `back`, in that order.
  2. When no instance is up and none is being restarted, `given_up` is called once, unless `close` came first.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Protocol

from seer.errors import InstanceError, SeerError


class Restartable(Protocol):
    """An instance that can be restarted."""

    @property
    def id(self) -> int:
        """Index within the fleet."""

    @property
    def is_up(self) -> bool:
        """Whether it accepts chunks."""

    async def restart(self) -> None:
        """Start it again after a loss."""


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
        """Supervise these instances; each must call `on_lost` when it goes down."""
        self._instances = instances

    def on_lost(self, instance: int, reason: str) -> None:
        """Report the loss and restart the instance."""
        self._lost(instance, reason)
        if not self._is_over:
            self._restarting[instance] = asyncio.create_task(self._restart(instance, reason))

    def stop(self) -> None:
        """Restart no more instances."""
        self._is_over = True
        for task in self._restarting.values():
            task.cancel()

    async def close(self) -> None:
        """Stop, and wait until no restart is going on."""
        self.stop()
        await asyncio.gather(*self._restarting.values(), return_exceptions=True)

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
            self._give_up_if_none_left(f"the last one lost was instance {instance}: {reason}")

    def _give_up_if_none_left(self, last: str) -> None:
        if self._is_over or self._restarting or any(instance.is_up for instance in self._instances):
            return
        self._is_over = True
        self._given_up(
            InstanceError(
                f"no instance is left; {last}",
                hint=f"each was restarted up to {self._max_restarts} times; see the instances' logs",
            )
        )
