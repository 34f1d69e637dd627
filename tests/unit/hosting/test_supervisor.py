# SPDX-License-Identifier: Apache-2.0
import asyncio

from seer.errors import InstanceError, SeerError
from seer.hosting.supervisor import Supervisor


class Restartable:
    def __init__(self, id: int, failures: int = 0) -> None:
        self.id = id
        self.is_up = True
        self.failures = failures

    async def restart(self) -> None:
        if self.failures:
            self.failures -= 1
            raise InstanceError("not yet")
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
        for _ in range(10):
            await asyncio.sleep(0)


def test_a_lost_instance_is_restarted() -> None:
    async def scenario() -> list[str]:
        driver = Driver([Restartable(0), Restartable(1)], max_restarts=1)
        await driver.lose(1)
        return driver.calls

    assert asyncio.run(scenario()) == ["lost 1", "back 1"]


def test_a_restart_that_fails_is_tried_again_within_the_limit() -> None:
    async def scenario() -> list[str]:
        driver = Driver([Restartable(0, failures=2)], max_restarts=3)
        await driver.lose(0)
        return driver.calls

    assert asyncio.run(scenario()) == ["lost 0", "back 0"]


def test_beyond_the_limit_the_others_go_on_and_the_last_one_ends_it() -> None:
    async def scenario() -> Driver:
        driver = Driver([Restartable(0), Restartable(1)], max_restarts=1)
        for instance in (0, 0, 1, 1):
            await driver.lose(instance)
        return driver

    driver = asyncio.run(scenario())
    assert driver.calls == ["lost 0", "back 0", "lost 0", "lost 1", "back 1", "lost 1", "given up"]
    assert "no instance is left" in str(driver.error)


def test_nothing_is_restarted_after_close() -> None:
    async def scenario() -> list[str]:
        driver = Driver([Restartable(0)], max_restarts=5)
        await driver.supervisor.close()
        await driver.lose(0)
        return driver.calls

    assert asyncio.run(scenario()) == ["lost 0"]
