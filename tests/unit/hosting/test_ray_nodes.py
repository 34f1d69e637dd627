# SPDX-License-Identifier: Apache-2.0
"""Nodes of a fleet whose agents die, answer late or not at all; agents in this process stand for Ray's."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest

from seer.errors import InstanceError
from seer.hosting.messages import UpdateWeights
from seer.hosting.ray.cluster import RayCluster
from seer.hosting.ray.nodes import Node, Nodes
from seer.hosting.ray.pool import NodesPool


class ActorDiedError(Exception):
    """As Ray's."""


class ActorUnavailableError(Exception):
    """As Ray's."""


class Agent:
    """Answers at once, unless it has an error, which comes when `may_answer` says so."""

    def __init__(self, error: Exception | None = None) -> None:
        self.error = error
        self.calls: list[tuple[Any, ...]] = []
        self.may_answer = asyncio.Event()
        self.was_asked = asyncio.Event()

    def __getattr__(self, name: str) -> Any:
        def call(*arguments: Any) -> Awaitable[Any]:
            self.calls.append((name, *arguments))
            return self._answer(name)

        return SimpleNamespace(remote=call)

    async def _answer(self, name: str) -> Any:
        self.was_asked.set()
        if self.error is not None:
            await self.may_answer.wait()
            raise self.error
        return name == "sees"


class Fakes:
    """Nodes whose preparation is ours."""

    def __init__(self, pool: NodesPool | None = None, *, lease_s: float = 600.0) -> None:
        exceptions = SimpleNamespace(ActorDiedError=ActorDiedError)
        cluster = SimpleNamespace(is_joined=False, ray=SimpleNamespace(exceptions=exceptions))
        self.nodes = Nodes(cast(RayCluster, cluster), pool, lease_s=lease_s)
        self.nodes._prepare = self._prepare  # type: ignore[method-assign]
        self.agents: list[Agent] = []
        self.make: Callable[[], Agent] = Agent
        self.may_prepare = asyncio.Event()
        self.may_prepare.set()

    async def _prepare(self, id: str) -> Node:
        agent = self.make()
        self.agents.append(agent)
        await self.may_prepare.wait()
        return Node(id, "10.0.0.2", agent)


def test_restarts_that_find_a_dead_agent_share_one_new_preparation() -> None:
    async def scenario() -> None:
        fakes = Fakes()
        await fakes.nodes.get("x")
        (dead,) = fakes.agents
        dead.error = ActorDiedError("it died")
        fakes.may_prepare.clear()
        first, second = (asyncio.create_task(fakes.nodes.get("x")) for _ in range(2))
        await dead.was_asked.wait()
        dead.may_answer.set()
        third = asyncio.create_task(fakes.nodes.get("x"))
        fakes.may_prepare.set()
        found = await asyncio.gather(first, second, third)
        assert len({id(node) for node in found}) == 1
        assert [agent is dead for agent in fakes.agents] == [True, False]
        await fakes.nodes.close()

    asyncio.run(scenario())


def test_an_answer_about_a_dead_agent_that_comes_late_does_not_end_the_new_preparation() -> None:
    async def scenario() -> None:
        fakes = Fakes()
        await fakes.nodes.get("x")
        (dead,) = fakes.agents
        dead.error = ActorDiedError("it died")
        late = asyncio.create_task(fakes.nodes.get("x"))
        await dead.was_asked.wait()
        fakes.nodes.forget("x")
        fakes.may_prepare.clear()
        early = asyncio.create_task(fakes.nodes.get("x"))
        while len(fakes.agents) < 2:  # noqa: ASYNC110 - a few turns of the event loop
            await asyncio.sleep(0)
        dead.may_answer.set()
        for _ in range(5):
            await asyncio.sleep(0)
        fakes.may_prepare.set()
        assert await early is await late
        await fakes.nodes.close()

    asyncio.run(scenario())


@pytest.mark.parametrize("error", [ActorDiedError("it died"), ActorUnavailableError("no answer")])
def test_an_agent_that_died_is_forgotten_at_its_renewal_and_one_out_of_reach_is_not(error: Exception) -> None:
    async def scenario() -> bool:
        fakes = Fakes(lease_s=0.02)
        await fakes.nodes.get("x")
        agent = fakes.agents[0]
        agent.error = error
        agent.may_answer.set()
        await agent.was_asked.wait()
        while fakes.nodes._renewing:
            await asyncio.wait(set(fakes.nodes._renewing))
        is_known = "x" in fakes.nodes._nodes
        await fakes.nodes.close()
        return is_known

    assert asyncio.run(scenario()) is isinstance(error, ActorUnavailableError)


def test_weights_reach_an_instance_whose_agent_has_died_through_a_new_one(tmp_path: Path) -> None:
    staged = tmp_path / "model.safetensors"
    staged.write_bytes(b"weights")
    command = UpdateWeights(str(staged), 1, True)

    async def scenario() -> None:
        fakes = Fakes()
        await fakes.nodes.get("x")
        dead = fakes.agents[0]
        dead.error = ActorDiedError("it died")
        dead.may_answer.set()
        assert await fakes.nodes.localized("x", command) == command
        assert [call[0] for call in fakes.agents[1].calls] == ["sees"]

        def make() -> Agent:
            raise ActorUnavailableError("the node is gone\nand more")

        fakes.agents[1].error, fakes.make = ActorDiedError("it died"), make
        fakes.agents[1].may_answer.set()
        other = UpdateWeights(str(staged.parent / "other"), 2, True)
        with pytest.raises(InstanceError, match=r"node x cannot be prepared: the node is gone$"):
            await fakes.nodes.localized("x", other)
        await fakes.nodes.close()

    asyncio.run(scenario())


def test_what_ended_before_a_run_is_freed_on_the_nodes_before_it_begins() -> None:
    """Requests of the next run have the same ids."""

    async def scenario() -> None:
        pool = NodesPool(1 << 20, block_bytes=4096)
        fakes = Fakes(pool)
        await fakes.nodes.get("x")
        pool.free(7)
        pool.drop_weights_version(2)
        await fakes.nodes.tidy()
        await fakes.nodes.tidy()  # waits for those that were sent before, too
        assert fakes.agents[0].calls == [("tidy", [7], [2]), ("tidy", [], [])]
        await fakes.nodes.close()

    asyncio.run(scenario())
