# SPDX-License-Identifier: Apache-2.0
"""Rollouts on a Ray cluster of two nodes on this machine: placement, deaths, nodes that leave and join."""

from __future__ import annotations

import asyncio
import json
import os
import signal
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from msgspec.structs import replace

pytest.importorskip("torch")
pytest.importorskip("ray")

from inbox import OutputInbox
from ray_clusters import OnRay, TwoNodes, two_nodes
from seer import HostingConfig, Rollout, RolloutConfig, Sampling
from seer.engine.instance_settings import InstanceSettings
from seer.engine.local.tiny import make_tiny_model, tiny_config, tiny_weights
from seer.engine.prepare import InstanceSpec
from seer.errors import ConfigError, InstanceError, SeerError
from seer.hosting.health import Health
from seer.hosting.ray.checkup import troubles_of
from seer.hosting.ray.hosting import RayHosting
from seer.hosting.ray.node_agent import FileMark, NodeAgent
from seer.hosting.ray.node_facts import NodeProbe, Reached
from seer.hosting.remote.handshake import our_version
from seer.metrics.events import Event, Stopped, discard

PROMPTS = [[3 + i, 7, 11, 5 + i, 9] for i in range(6)]
DEADLINE_S = 120.0


@pytest.fixture(scope="module")
def cluster() -> Iterator[TwoNodes]:
    with two_nodes() as made:
        yield made


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_tiny_model(tmp_path_factory.mktemp("model") / "tiny")


def a_rollout(model: Path, hosting: HostingConfig, **settings: Any) -> Rollout:
    given: dict[str, Any] = {"instances": 2, "kv_blocks": 512, "max_num_seqs": 8, "chunk_tokens": 16}
    return Rollout(model, hosting=hosting, **given | settings)


async def tokens_of(rollout: Rollout, events: Callable[[Event], None] = discard) -> dict[tuple[int, int], list[int]]:
    found: dict[tuple[int, int], list[int]] = {}
    async with asyncio.timeout(DEADLINE_S):
        async for group in rollout.run(PROMPTS, n=4, sampling=Sampling(max_tokens=80), events=events):
            for response in group.responses:
                assert (response.group, response.index) not in found
                found[response.group, response.index] = response.token_ids
    return found


class Once:
    """Strikes when the first request has generated some tokens."""

    def __init__(self, strike: Callable[[], None]) -> None:
        self._strike: Callable[[], None] | None = strike

    def __call__(self, event: Event) -> None:
        if self._strike is not None and isinstance(event, Stopped) and event.num_generated >= 32:
            strike, self._strike = self._strike, None
            strike()


@pytest.fixture(scope="module")
def expected(model: Path) -> list[dict[tuple[int, int], list[int]]]:
    """Tokens of this machine alone: with the model's weights, then with others."""

    async def scenario() -> list[dict[tuple[int, int], list[int]]]:
        async with a_rollout(model, HostingConfig(pin_cores=False), instances=1) as rollout:
            first = await tokens_of(rollout)
            await rollout.update_weights(tiny_weights(tiny_config(), seed=5))
            return [first, await tokens_of(rollout)]

    return asyncio.run(scenario())


async def agents_of(rollout: Rollout) -> list[int]:
    """Process ids of the nodes' agents."""
    hosting = rollout.fleet._hosting
    assert isinstance(hosting, RayHosting)
    assert hosting._nodes is not None
    return [int(await task.result().agent.renew.remote()) for _, task in hosting._nodes._ready()]


def test_tokens_are_those_of_one_machine_through_deaths_new_weights_and_nodes_and_instances_that_come_and_go(
    cluster: TwoNodes, model: Path, expected: list[dict[tuple[int, int], list[int]]], tmp_path: Path
) -> None:
    hosting = HostingConfig(
        pin_cores=False, ray=cluster.address, log_dir=tmp_path, heartbeat_s=0.2, silence_deadline_s=8.0
    )
    pids: list[int] = []

    async def scenario() -> None:
        async with a_rollout(model, hosting) as rollout:
            fleet = rollout.fleet
            assert [status.health for status in fleet.view()] == [Health.HEALTHY] * 2
            assert all(status.node for status in fleet.view())
            pids.extend(one.pid or 0 for one in fleet.instances)
            assert await tokens_of(rollout) == expected[0]

            kill = Once(lambda: os.kill(fleet.instances[1].pid or 0, signal.SIGKILL))
            assert await tokens_of(rollout, kill) == expected[0]
            await fleet.wait_until_up()

            for pid in await agents_of(rollout):
                os.kill(pid, signal.SIGKILL)  # their instances live on, and new weights come through new agents
            await rollout.update_weights(tiny_weights(tiny_config(), seed=5))
            assert [status.weights_version for status in fleet.view()] == [1, 1]
            assert fleet.num_lost == 1
            assert await tokens_of(rollout, Once(cluster.replace_second)) == expected[1]
            async with asyncio.timeout(DEADLINE_S):
                await fleet.wait_until_up()
            # What came back has the weights of now, and was healthy only with them.
            assert [(one.health, one.weights_version) for one in fleet.view()] == [(Health.HEALTHY, 1)] * 2
            assert sum(status.num_lost for status in fleet.view()) == fleet.num_lost == 2
            pids.extend(one.pid or 0 for one in fleet.instances)

            await rollout.remove_instances([0])  # its node has the only place for another
            assert await rollout.add_instances(1, max_num_seqs=3) == [2]
            assert [one.max_num_seqs for one in fleet.limits] == [8, 3]
            assert [status.health for status in fleet.view()] == [Health.RETIRED, Health.HEALTHY, Health.HEALTHY]
            assert await tokens_of(rollout) == expected[1]
            pids.append(fleet.instances[2].pid or 0)
        assert [status.health for status in fleet.view()] == [Health.RETIRED] * 3

    asyncio.run(scenario())
    assert len(set(pids)) > 2
    assert not [pid for pid in pids if Path(f"/proc/{pid}").exists()], "an instance outlived its rollout"
    assert {path.name for path in tmp_path.iterdir()} == {f"instance-{id}.log" for id in range(3)}


def a_spec(model: str = "/nowhere") -> InstanceSpec:
    """An instance of a model that is not there."""
    settings = InstanceSettings(config=RolloutConfig(model=model).fitted())
    return InstanceSpec(factory="seer.engine.local.hosted:make_local", settings=settings)


def test_a_node_that_was_out_of_reach_is_left_out(cluster: TwoNodes) -> None:
    async def scenario() -> None:
        await cluster.settle()
        instance = OnRay(cluster.address, a_spec(), HostingConfig())
        await instance.hosting.start()
        placer = instance.hosting.launcher._placer
        nodes = sorted(instance.hosting._cluster.nodes())
        for avoided, wanted in (nodes, nodes[::-1]):
            placer._suspected_s.clear()
            placer.suspect(avoided)
            place = await placer.place("one", {"CPU": 1.0}, DEADLINE_S)
            assert place.node == wanted
            placer.give_back(place.group)
        await instance.hosting.close()

    asyncio.run(scenario())


def test_what_cannot_be_placed_or_started_is_said_by_name(cluster: TwoNodes) -> None:
    async def scenario() -> None:
        await cluster.settle()
        instance = OnRay(cluster.address, a_spec(), HostingConfig())
        await instance.hosting.start()
        with pytest.raises(InstanceError, match=r"it needs 64 CPU, the cluster has 2 nodes with 2 CPU"):
            await instance.hosting.launcher._placer.place("instance-0", {"CPU": 64.0}, 2.0)
        with pytest.raises(SeerError, match="instance 0: there is no model folder at /nowhere"):
            await instance.inner.start(OutputInbox())
        await instance.close()

    asyncio.run(scenario())


@pytest.mark.parametrize("address", ["127.0.0.1:1", "ray://127.0.0.1:1", "somewhere"])
def test_a_cluster_that_is_not_there_is_refused_at_once(address: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("ray.is_initialized", lambda: False)
    with pytest.raises(ConfigError, match=f"no Ray cluster can be joined at {address}") as caught:
        asyncio.run(_join(address))
    assert "ray start" in (caught.value.hint or "")


async def _join(address: str) -> None:
    from seer.hosting.ray.cluster import RayCluster

    await RayCluster(address).connect()


def test_an_agent_holds_the_newest_weights_and_frees_them(tmp_path: Path) -> None:
    """In this process: what Ray calls on a node."""
    agent = NodeAgent(lease_s=60.0)
    file = tmp_path / "model.safetensors"
    file.write_bytes(b"weights")
    assert agent.sees(FileMark.of(file))
    assert not agent.sees(FileMark.of(file)._replace(inode=1))
    assert not agent.sees(FileMark("/nowhere", 1, 2, 3))
    paths = []
    for part in (b"first", b"second"):
        path = agent.begin_weights("model.safetensors", len(part) + 1)
        agent.add_weights(path, 0, part)
        with pytest.raises(InstanceError, match=f"have {len(part)} bytes, {len(part) + 1} were to come"):
            agent.end_weights(path)
        agent.add_weights(path, len(part), b"!")
        agent.end_weights(path)
        paths.append(Path(path))
        assert paths[-1].read_bytes() == part + b"!"
    assert not paths[0].exists()
    with pytest.raises(InstanceError, match="this node now takes"):
        agent.add_weights(str(paths[0]), 0, b"late")
    assert paths[1].read_bytes() == b"second!"
    agent.close()
    assert not paths[1].exists()


def test_the_doctor_looks_at_every_node(cluster: TwoNodes, capsys: pytest.CaptureFixture[str]) -> None:
    from seer.cli import doctor_ray

    assert doctor_ray.run(cluster.address, as_json=True) == 0
    reports = json.loads(capsys.readouterr().out)
    assert [report["resources"]["CPU"] for report in reports] == [1.0, 1.0]
    for report in reports:
        assert report["facts"]["seer"] == our_version()
        assert report["clock"]["offset_s"] == 0.0, "one machine has one clock"
        assert report["facts"]["packages"]["ray"]
        assert report["reached"]["bandwidth_bytes_s"] > 0
        assert report["reached_next"]["bandwidth_bytes_s"] > 0
    assert doctor_ray.run(cluster.address, as_json=False) == 0
    assert capsys.readouterr().out.count("ok") == 2


def test_what_keeps_instances_from_a_node_is_said() -> None:
    facts, fine = NodeProbe().facts(), Reached(bandwidth_bytes_s=1.0)
    assert troubles_of(facts, fine, "10.0.0.1", {"CPU": 4.0}) == []
    (trouble,) = troubles_of(replace(facts, seer="9.9"), fine, "10.0.0.1", {})
    assert "Seer 9.9 there" in trouble
    (trouble,) = troubles_of(replace(facts, packages={"ray": "1.0", "of-there-alone": "2"}), fine, "10.0.0.1", {})
    assert "ray 1.0 there" in trouble
    (trouble,) = troubles_of(replace(facts, num_gpus=7), fine, "10.0.0.1", {"GPU": 8.0})
    assert trouble == "Ray counts 8 GPUs there, NVIDIA's driver 7"
    assert troubles_of(replace(facts, num_gpus=None), fine, "10.0.0.1", {"GPU": 8.0}) == []
    reached = NodeProbe().reach("127.0.0.1", 1, 10)
    assert troubles_of(facts, reached, "127.0.0.1", {}) == [f"it cannot connect to 127.0.0.1: {reached.error}"]


def test_a_node_reads_what_another_offers() -> None:
    port = NodeProbe().offer("127.0.0.1", 3 << 20)
    reached = NodeProbe().reach("127.0.0.1", port, 3 << 20)
    assert reached.error is None
    assert reached.bandwidth_bytes_s is not None


def test_a_connection_that_is_closed_early_counts_as_an_error() -> None:
    port = NodeProbe().offer("127.0.0.1", 1 << 20)
    assert NodeProbe().reach("127.0.0.1", port, 3 << 20) == Reached(
        error="the connection was closed after 1048576 of 3145728 bytes"
    )


def test_instances_that_share_experts_meet_at_the_first_ones_node_and_end_together(
    cluster: TwoNodes, tmp_path: Path
) -> None:
    hosting = HostingConfig(pin_cores=False, ray=cluster.address, log_dir=tmp_path, restart_pause_s=0.0)

    def places(instance: int) -> list[str]:
        lines = (tmp_path / f"instance-{instance}.log").read_text().splitlines()
        return [line.partition(" at ")[2] for line in lines if line.startswith(f"rank {instance} of 2")]

    async def scenario() -> None:
        await cluster.settle()  # the test before may have lost a node
        rollout = Rollout("none", engine="fake", instances=2, data_parallel=2, hosting=hosting)
        object.__setattr__(rollout.engine, "factory", "host_fakes:make_rank")
        async with rollout:
            first = rollout.fleet.view()[0].node
            undisturbed = await tokens_of(rollout)
            os.kill(rollout.fleet.instances[1].pid or 0, signal.SIGKILL)
            async with asyncio.timeout(DEADLINE_S):
                while rollout.fleet.num_lost < 2:  # noqa: ASYNC110 - nothing says when it is noticed
                    await asyncio.sleep(0.01)
                await rollout.fleet.wait_until_up()
            assert [status.num_lost for status in rollout.fleet.view()] == [1, 1]
            assert await tokens_of(rollout) == undisturbed
            assert all(place.startswith(f"{first}:") for place in places(0)[:1])

    asyncio.run(scenario())
    assert places(0) == places(1)
    assert len(set(places(0))) == 2
