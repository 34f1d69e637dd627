# SPDX-License-Identifier: Apache-2.0
"""Restarts lost instances, each at most `max_restarts` times an hour, and reports when none is left.

Knows nothing of rollouts: it calls `lost` and `back`, and the fleet passes them to the rollout loop. An instance whose
restarts are used up stays down until the hour is over (restart_budget.py), then it is restarted again.

Invariants
  1. Each loss leads to one `lost`, and to at most one `back`, in that order.
  2. When no instance is up and the restarts of all are used up, `given_up` is called, once until one is back, unless
     `stop` came first. Those that start together are used up with the first of them: the others only wait for it.

Waits for                                    unblocked by
  the pause before a restart                   time, `stop`
  a new hour of restarts                       time, `stop`
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Sequence
from typing import Protocol

from seer.errors import InstanceError, SeerError
from seer.hosting.restart_budget import RestartBudget

log = logging.getLogger(__name__)


class Restartable(Protocol):
    """An instance that can be restarted."""

    @property
    def id(self) -> int:
        """Index within the fleet."""

    @property
    def is_up(self) -> bool:
        """Whether it accepts chunks."""

    @property
    def ranks(self) -> Sequence[int]:
        """The instances that start together, this one among them."""

    async def restart(self) -> None:
        """Start it again after a loss."""


class Supervisor:
    """Restarts instances within a limit."""

    def __init__(
        self,
        *,
        max_restarts: int,
        restart_pause_s: float = 1.0,
        lost: Callable[[int, str], None],
        back: Callable[[int], None],
        given_up: Callable[[SeerError], None],
    ) -> None:
        self._max_restarts = max_restarts
        self._restart_pause_s = restart_pause_s
        self._lost = lost
        self._back = back
        self._given_up = given_up
        self._instances: Sequence[Restartable] = ()
        self._released: set[int] = set()
        self._budgets: dict[int, RestartBudget] = {}
        self._restarting: dict[int, asyncio.Task[None]] = {}
        self._given_up_restarts: set[asyncio.Task[None]] = set()
        self._exhausted: set[int] = set()  # down until their budget is renewed, or for good
        self._has_given_up = False
        self._is_over = False

    def watch(self, instances: Sequence[Restartable]) -> None:
        """Supervise the instances of this list, which may grow; each must call `on_lost` when it goes down."""
        self._instances = instances

    def joined(self) -> None:
        """An instance was added to the list: one is left again."""
        self._has_given_up = False

    def release(self, instance: int) -> None:
        """Restart this one no more: it leaves the fleet. Call `left` when it has."""
        self._released.add(instance)
        self._exhausted.discard(instance)
        restart = self._restarting.pop(instance, None)
        if restart is not None:
            restart.cancel()
            self._given_up_restarts.add(restart)
            restart.add_done_callback(self._given_up_restarts.discard)

    async def released(self) -> None:
        """Wait until the restarts of those that were released have ended, with the processes that they had begun."""
        await asyncio.gather(*self._given_up_restarts, return_exceptions=True)

    def left(self) -> None:
        """Released instances are down: those that stay may have no restarts left."""
        self._give_up_if_none_left("the last one that was up was removed")

    def on_lost(self, instance: int, reason: str) -> None:
        """Report the loss and restart the instance."""
        self._lost(instance, reason)
        if not self._is_over and instance not in self._released:
            self._restarting[instance] = asyncio.create_task(self._restarted(instance, reason))

    def stop(self) -> None:
        """Restart no more instances."""
        self._is_over = True
        for task in self._restarting.values():
            task.cancel()

    async def close(self) -> None:
        """Stop, and wait until no restart is going on."""
        self.stop()
        await asyncio.gather(*self._restarting.values(), *self._given_up_restarts, return_exceptions=True)

    async def _restarted(self, instance: int, reason: str) -> None:
        this, failure = asyncio.current_task(), None
        try:
            if await self._restart(instance, reason) and instance not in self._released:
                self._has_given_up = False
                self._back(instance)
        except Exception as error:  # nothing awaits this task: in silence the others would wait for it
            log.exception("instance %d is not restarted any more", instance)
            failure = error
            self._exhausted.add(instance)
        finally:  # however it ended: one that is counted as coming keeps `given_up` from being called
            if self._restarting.get(instance) is this:
                del self._restarting[instance]
        if failure is not None:
            self._give_up_if_none_left(
                f"the restart of instance {instance} failed: {type(failure).__name__}: {failure}"
            )

    async def _restart(self, instance: int, reason: str) -> bool:
        """Restart until it is up; False if it never may be again."""
        budget = self._budgets.setdefault(instance, RestartBudget(self._max_restarts, self._restart_pause_s))
        while True:
            pause_s = budget.pause_s(_now_s())
            if pause_s is None:
                if not await self._wait_for_budget(instance, budget, reason):
                    return False
                continue
            await asyncio.sleep(pause_s)
            budget.spend(_now_s())
            try:
                await self._instances[instance].restart()
                return True
            except (SeerError, OSError, MemoryError) as error:  # no process can be made now
                log.warning("instance %d was not restarted: %s", instance, error)
                reason = str(error)

    async def _wait_for_budget(self, instance: int, budget: RestartBudget, reason: str) -> bool:
        """Wait until an instance may be restarted again; False if it never may."""
        wait_s = budget.renewed_in_s(_now_s())
        self._exhausted.add(instance)
        self._give_up_if_none_left(f"the last one lost was instance {instance}: {reason}")
        if wait_s is None:
            return False
        await asyncio.sleep(wait_s)
        self._exhausted.discard(instance)
        return True

    def _give_up_if_none_left(self, last: str) -> None:
        is_one_coming = any(self._exhausted.isdisjoint(self._instances[one].ranks) for one in self._restarting)
        if self._is_over or self._has_given_up or is_one_coming or any(one.is_up for one in self._instances):
            return
        self._has_given_up = True
        self._given_up(
            InstanceError(
                f"no instance is left; {last}",
                hint=f"each was restarted up to {self._max_restarts} times within an hour; see the instances' logs",
            )
        )


def _now_s() -> float:
    return asyncio.get_running_loop().time()
