# SPDX-License-Identifier: Apache-2.0
import asyncio

import pytest

from seer.errors import InstanceError, SeerError
from seer.hosting.restart_budget import LONGEST_PAUSE_S, WINDOW_S, RestartBudget
from seer.hosting.supervisor import Supervisor
from seer.sim.virtual_time import run


class Restartable:
    def __init__(
        self, id: int, failures: int = 0, error: type[Exception] = InstanceError, ranks: tuple[int, ...] = ()
    ) -> None:
        self.id = id
        self.ranks = ranks or (id,)
        self.is_up = True
        self.failures = failures
        self.error = error

    async def restart(self) -> None:
        if self.failures:
            self.failures -= 1
            raise self.error("not yet")
        self.is_up = True


class Driver:
    def __init__(self, instances: list[Restartable], max_restarts: int) -> None:
        self.calls: list[str] = []
        self.error: SeerError | None = None
        self.instances = instances
        self.supervisor = Supervisor(
            max_restarts=max_restarts,
            lost=lambda i, reason: self.calls.append(f"lost {i}"),
            back=lambda i: self.calls.append(f"back {i}"),
            given_up=self._give_up,
        )
        self.supervisor.watch(list(instances))

    def _give_up(self, error: SeerError) -> None:
        self.calls.append("given up")
        self.error = error

    async def lose(self, instance: int) -> None:
        self.instances[instance].is_up = False
        self.supervisor.on_lost(instance, "killed")
        await asyncio.sleep(10.0)  # virtual: longer than the pauses of a few restarts


def test_a_lost_instance_is_restarted() -> None:
    async def scenario() -> list[str]:
        driver = Driver([Restartable(0), Restartable(1)], max_restarts=1)
        await driver.lose(1)
        return driver.calls

    assert run(scenario()) == ["lost 1", "back 1"]


@pytest.mark.parametrize("error", [InstanceError, BlockingIOError, MemoryError])
def test_a_restart_that_fails_is_tried_again_within_the_limit(error: type[Exception]) -> None:
    """The last two: no process can be made now."""

    async def scenario() -> list[str]:
        driver = Driver([Restartable(0, failures=2, error=error)], max_restarts=3)
        await driver.lose(0)
        return driver.calls

    assert run(scenario()) == ["lost 0", "back 0"]


def test_beyond_the_limit_the_others_go_on_and_the_last_one_ends_it() -> None:
    async def scenario() -> Driver:
        driver = Driver([Restartable(0), Restartable(1)], max_restarts=1)
        for instance in (0, 0, 1, 1):
            await driver.lose(instance)
        return driver

    driver = run(scenario())
    assert driver.calls == ["lost 0", "back 0", "lost 0", "lost 1", "back 1", "lost 1", "given up"]
    assert "no instance is left" in str(driver.error)


@pytest.mark.parametrize("error", [InstanceError, AssertionError])
def test_one_that_waits_for_another_without_restarts_is_not_waited_for(error: type[Exception]) -> None:
    class Waiting(Restartable):
        async def restart(self) -> None:
            await asyncio.Event().wait()

    async def scenario() -> Driver:
        ranks = (0, 1)
        driver = Driver([Waiting(0, ranks=ranks), Restartable(1, failures=9, error=error, ranks=ranks)], max_restarts=1)
        driver.instances[1].is_up = False
        await driver.lose(0)
        assert driver.calls == ["lost 0"]
        await driver.lose(1)
        await driver.supervisor.close()
        return driver

    driver = run(scenario())
    assert driver.calls == ["lost 0", "lost 1", "given up"]
    assert "instance 1" in str(driver.error)


def test_a_restart_that_breaks_down_is_not_waited_for() -> None:
    async def scenario() -> list[str]:
        driver = Driver([Restartable(0, failures=1, error=AssertionError), Restartable(1)], max_restarts=0)
        driver.supervisor._budgets[0] = RestartBudget(1)
        for instance in driver.instances:
            instance.is_up = False
            driver.supervisor.on_lost(instance.id, "killed")
            await asyncio.gather(*driver.supervisor._restarting.values(), return_exceptions=True)
        return driver.calls

    assert asyncio.run(scenario()) == ["lost 0", "lost 1", "given up"]


def test_a_sole_instance_whose_restart_breaks_down_ends_the_rollout_with_the_reason() -> None:
    async def scenario() -> Driver:
        driver = Driver([Restartable(0, failures=1, error=AssertionError)], max_restarts=3)
        await driver.lose(0)
        return driver

    driver = run(scenario())
    assert driver.calls == ["lost 0", "given up"]
    assert "the restart of instance 0 failed: AssertionError: not yet" in str(driver.error)


def test_a_restart_that_is_given_up_is_over_when_that_was_waited_for() -> None:
    ended: list[int] = []

    class Slow(Restartable):
        async def restart(self) -> None:
            try:
                await asyncio.sleep(100.0)
            finally:
                await asyncio.sleep(1.0)  # its process is ended
                ended.append(self.id)

    async def scenario() -> list[str]:
        driver = Driver([Slow(0), Slow(1)], max_restarts=3)
        for instance in (0, 1):
            await driver.lose(instance)
        driver.supervisor.release(0)
        await driver.supervisor.released()
        assert ended == [0]
        driver.supervisor.release(1)
        await driver.supervisor.close()
        assert ended == [0, 1]
        return driver.calls

    assert run(scenario()) == ["lost 0", "lost 1"]


def test_an_instance_that_is_killed_now_and_then_always_comes_back() -> None:
    async def scenario() -> list[str]:
        driver = Driver([Restartable(0)], max_restarts=3)
        for _ in range(20):
            await driver.lose(0)
            await asyncio.sleep(WINDOW_S / 3)
        return driver.calls

    assert run(scenario()) == ["lost 0", "back 0"] * 20


def test_an_instance_whose_restarts_are_used_up_comes_back_after_the_hour() -> None:
    async def scenario() -> Driver:
        driver = Driver([Restartable(0)], max_restarts=2)
        for _ in range(3):
            await driver.lose(0)
        assert driver.calls[-1] == "given up"
        await asyncio.sleep(WINDOW_S)
        return driver

    assert run(scenario()).calls == ["lost 0", "back 0", "lost 0", "back 0", "lost 0", "given up", "back 0"]


def test_pauses_grow_and_a_budget_is_renewed() -> None:
    budget, now_s, pauses = RestartBudget(9), 0.0, []
    while (pause_s := budget.pause_s(now_s)) is not None:
        pauses.append(pause_s)
        now_s += pause_s
        budget.spend(now_s)
    assert pauses == [0.0, 1.0, 2.0, 4.0, 8.0, 16.0, 32.0, LONGEST_PAUSE_S, LONGEST_PAUSE_S]
    assert budget.renewed_in_s(now_s) == pytest.approx(WINDOW_S - now_s)
    assert budget.pause_s(WINDOW_S) == LONGEST_PAUSE_S
    assert RestartBudget(0).renewed_in_s(0.0) is None


def test_nothing_is_restarted_after_close() -> None:
    async def scenario() -> list[str]:
        driver = Driver([Restartable(0)], max_restarts=5)
        await driver.supervisor.close()
        await driver.lose(0)
        return driver.calls

    assert run(scenario()) == ["lost 0"]
