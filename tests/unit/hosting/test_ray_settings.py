# SPDX-License-Identifier: Apache-2.0
"""What a rollout on a cluster is set to: refused contradictions, pools, addresses, and parts that need no Ray."""

from __future__ import annotations

import asyncio
import logging
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from pools import needs_mooncake
from seer.config import HostingConfig, PoolConfig, RolloutConfig, from_keywords
from seer.engine.instance_settings import InstanceSettings
from seer.engine.prepare import InstanceSpec, PreparedEngine
from seer.errors import ConfigError, InstanceError, PoolError
from seer.hosting.devices import InstanceNeeds, devices_on_nodes
from seer.hosting.draft_server_process import DraftServerProcess
from seer.hosting.fleet_pool import FleetPool
from seer.hosting.hostings import LocalHosting, make_hosting
from seer.hosting.memory_plan import node_pool_bytes, plan_memory, pool_bytes
from seer.hosting.messages import BeginRun, UpdateWeights
from seer.hosting.pool_choice import choose_pool
from seer.hosting.ray.host_actor import plain_error
from seer.hosting.ray.log_copy import LogCopy
from seer.hosting.ray.node_agent import FileMark, NodeAgent
from seer.hosting.ray.nodes import Node
from seer.hosting.ray.pool import NodesPool

ON_RAY = HostingConfig(ray="auto")


def an_engine(**changes: Any) -> PreparedEngine:
    """A model of 1,000 bytes a block, as it is after `prepare`."""
    config = RolloutConfig(model="m", hosting=ON_RAY, instances=4, **changes).fitted()
    return PreparedEngine(
        factory="",
        config=config,
        codec=None,
        max_model_len=100,
        model_dir=None,
        block_bytes=1000,
        vocab_size=None,
        value_bytes=None,
        can_draft=False,
    )


def test_ray_is_a_setting_and_a_keyword() -> None:
    assert from_keywords("m", {"ray": "10.0.0.1:6379"}).hosting.ray == "10.0.0.1:6379"
    assert from_keywords("m", {}).hosting.ray is None
    with pytest.raises(ConfigError, match=r"hosting\.ray is empty"):
        HostingConfig(ray="")


@pytest.mark.parametrize(
    ("changes", "name"),
    [
        ({"device": "cuda", "gpus": (0,)}, "gpus"),
        ({"device": "cuda", "share_gpus": True}, "share_gpus"),
        ({"device": "cuda:1"}, "device='cuda:1'"),
        ({"pool": PoolConfig(ssd_dir=Path("/ssd"))}, r"pool\.ssd_dir"),
    ],
)
def test_settings_of_one_machine_are_refused_on_a_cluster(changes: dict[str, Any], name: str) -> None:
    RolloutConfig(model="m", **changes)
    with pytest.raises(ConfigError, match=f"{name} is of one machine"):
        RolloutConfig(model="m", hosting=ON_RAY, **changes)


def test_nodes_share_no_local_pool_and_that_is_said(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.WARNING)
    assert pool_bytes(an_engine()) == 0
    assert choose_pool(an_engine()) is None
    assert "share no KV pool" in caplog.text
    caplog.clear()
    assert choose_pool(an_engine(pool=PoolConfig(backend="none"))) is None
    assert caplog.text == ""


def test_a_pool_between_nodes_is_mooncake_with_memory_of_each_node() -> None:
    asked = an_engine(pool=PoolConfig(backend="mooncake", memory_bytes=5 << 20, protocol="tcp"))
    pool = choose_pool(asked)
    assert pool is not None
    assert pool.between_nodes is not None
    assert (pool.between_nodes.node_bytes, pool.settings["backend"]) == (5 << 20, "mooncake")
    assert pool.between_nodes.protocol == "tcp"
    with pytest.raises(ConfigError, match=r"pool\.protocol='udp'"):
        PoolConfig(protocol="udp")  # type: ignore[arg-type]
    assert node_pool_bytes(an_engine()) == 2 * 4 * (1 << 30), "twice the KV of all instances, as on one machine"


def test_the_memory_of_other_machines_is_not_planned_by_this_ones() -> None:
    plan = plan_memory(an_engine(device="cuda"))
    assert plan.notes()[0] == "the instances run on nodes of a cluster, whose memory `seer doctor --ray` shows"
    assert "there is no" not in " ".join(plan.notes())
    assert (plan.num_on_device, plan.free_device_bytes) == (1, None)


def test_an_instance_asks_for_its_ranks() -> None:
    assert InstanceNeeds(num_gpus=2).bundle() == {"CPU": 1.0, "GPU": 2.0}
    assert InstanceNeeds(num_cpus=3).bundle() == {"CPU": 3.0}
    on_gpus = RolloutConfig(model="m", engine="vllm", device="cuda", tensor_parallel=4)
    assert devices_on_nodes(on_gpus).needs == InstanceNeeds(num_gpus=4)
    on_cores = RolloutConfig(model="m", engine="vllm", tensor_parallel=2)
    assert devices_on_nodes(on_cores).needs == InstanceNeeds(num_cpus=2, single_thread=True)
    assert isinstance(make_hosting(RolloutConfig(model="m"), None), LocalHosting)


class Answer:
    """A method of an actor: `remote` returns something to await."""

    def __init__(self, call: Any) -> None:
        self._call = call

    def remote(self, *arguments: Any) -> Any:
        async def answer() -> Any:
            return self._call(*arguments)

        return answer()


class InProcess:
    """An agent of another machine, in this process."""

    def __init__(self, agent: NodeAgent, *, sees: bool) -> None:
        self._agent, self._sees = agent, sees
        self.calls: list[str] = []
        self._called = asyncio.Event()

    async def until(self, name: str, num: int) -> None:
        """Wait for so many calls."""
        while self.calls.count(name) < num:
            self._called.clear()
            await self._called.wait()

    def __getattr__(self, name: str) -> Answer:
        def call(*arguments: Any) -> Any:
            self.calls.append(name)
            self._called.set()
            return self._sees if name == "sees" else getattr(self._agent, name)(*arguments)

        return Answer(call)


@pytest.mark.parametrize("sees", [True, False])
def test_weights_go_to_a_node_once_and_to_the_drivers_own_never(sees: bool, tmp_path: Path) -> None:
    staged = tmp_path / "model.safetensors"
    staged.write_bytes(bytes(range(256)) * 1000)
    agent = NodeAgent(lease_s=60.0)
    probe = InProcess(agent, sees=sees)
    node = Node("id", "10.0.0.2", probe)

    async def scenario() -> list[Any]:
        command = UpdateWeights(str(staged), 3, True)
        return list(await asyncio.gather(*(node.localized(command) for _ in range(3))))

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("seer.hosting.ray.nodes.PART_BYTES", 100_000)
        commands = asyncio.run(scenario())
    assert {command.weights_version for command in commands} == {3}
    (path,) = {command.path for command in commands}
    assert (path == str(staged)) is sees
    assert Path(path).read_bytes() == staged.read_bytes()
    assert probe.calls.count("begin_weights") == (0 if sees else 1)
    agent.close()


def two_versions(folder: Path) -> tuple[UpdateWeights, UpdateWeights]:
    """Staged files of one size, each of one byte."""
    commands = []
    for number in (1, 2):
        staged = folder / str(number) / "model.safetensors"
        staged.parent.mkdir()
        staged.write_bytes(str(number).encode() * 1_000_000)
        commands.append(UpdateWeights(str(staged), number, True))
    return commands[0], commands[1]


@pytest.mark.parametrize("num_parts_before", range(10))
def test_weights_that_overtake_others_never_mix_with_them(num_parts_before: int, tmp_path: Path) -> None:
    """As when an instance repeats the old ones after a restart, or an update that was given up is tried again."""
    agent = NodeAgent(lease_s=60.0)
    probe = InProcess(agent, sees=False)
    node = Node("id", "10.0.0.2", probe)
    old, new = two_versions(tmp_path)

    async def scenario() -> list[Any]:
        first = asyncio.create_task(node.localized(old))
        await probe.until("add_weights", num_parts_before)
        again = asyncio.create_task(node.localized(new))
        return list(await asyncio.gather(first, again, node.localized(new), return_exceptions=True))

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("seer.hosting.ray.nodes.PART_BYTES", 100_000)
        overtaken, *brought = asyncio.run(scenario())
    assert isinstance(overtaken, InstanceError), "its file is gone"
    assert "others have been asked for since" in str(overtaken)
    (path,) = {command.path for command in brought}
    assert Path(path).read_bytes() == b"2" * 1_000_000
    agent.close()


def test_weights_of_an_update_that_was_given_up_are_no_part_of_the_next(tmp_path: Path) -> None:
    agent = NodeAgent(lease_s=60.0)
    probe = InProcess(agent, sees=False)
    node = Node("id", "10.0.0.2", probe)
    old, new = two_versions(tmp_path)

    async def scenario() -> str:
        given_up = asyncio.create_task(node.localized(old))
        await probe.until("add_weights", 3)
        given_up.cancel()
        brought = await node.localized(new)
        assert isinstance(brought, UpdateWeights)
        await node.close()
        return brought.path

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("seer.hosting.ray.nodes.PART_BYTES", 100_000)
        path = asyncio.run(scenario())
    assert Path(path).read_bytes() == b"2" * 1_000_000
    agent.close()


AGENT = """
import time
from seer.hosting.ray.node_agent import NodeAgent
agent = NodeAgent(lease_s=600.0)
path = agent.begin_weights("model.safetensors", 3)
agent.add_weights(path, 0, b"abc")
agent._near.start(1 << 20, 4096)
agent._janitor._process.wait()  # it has left the agent's children: only these are ended with a worker of Ray
print(path, agent._near.settings()["near"]["name"], flush=True)
time.sleep(600)
"""


def test_shared_memory_of_an_agent_that_is_killed_with_its_children_does_not_stay() -> None:
    with subprocess.Popen([sys.executable, "-c", AGENT], stdout=subprocess.PIPE, text=True) as agent:
        assert agent.stdout is not None
        path, pool = agent.stdout.readline().split()
        assert Path(path).read_bytes() == b"abc"
        (arena,) = Path("/dev/shm").glob(f"*/pool-{pool}.arena")
        assert not Path(f"/proc/{agent.pid}/task/{agent.pid}/children").read_text().split()
        agent.kill()
    last_s = time.monotonic() + 60.0
    while Path(path).parent.exists() or arena.exists():
        assert time.monotonic() < last_s, "the weights, or the near tier, are still there"
        time.sleep(0.01)


def test_an_agent_whose_lease_is_over_ends_also_where_its_store_does_not(monkeypatch: pytest.MonkeyPatch) -> None:
    agent = NodeAgent(lease_s=600.0)
    ended: list[int] = []

    def hang() -> None:
        raise subprocess.TimeoutExpired("mooncake_client", 5.0)

    monkeypatch.setattr("os._exit", ended.append)
    with monkeypatch.context() as patch:
        patch.setattr(agent, "close", hang)
        with pytest.raises(subprocess.TimeoutExpired):
            agent._abandon()
    assert ended == [1]
    agent.close()


def test_commands_without_staged_files_go_as_they_are() -> None:
    node = Node("id", "10.0.0.2", None)

    async def scenario() -> None:
        for command in (UpdateWeights("/shared/model", 1), BeginRun("run", "none", 0)):
            assert await node.localized(command) is command

    asyncio.run(scenario())


def test_weights_that_did_not_arrive_are_tried_again(tmp_path: Path) -> None:
    staged = tmp_path / "model.safetensors"
    staged.write_bytes(b"weights")

    class Failing:
        def __init__(self) -> None:
            self.tries = 0
            self.sees = Answer(self._sees)

        def _sees(self, mark: FileMark) -> bool:
            self.tries += 1
            if self.tries == 1:
                raise RuntimeError("the actor died\nwith a page of text")
            return True

    failing = Failing()
    node = Node("id", "10.0.0.2", failing)

    async def scenario() -> None:
        command = UpdateWeights(str(staged), 1, True)
        with pytest.raises(InstanceError, match=r"brought to node 10\.0\.0\.2: the actor died$"):
            await node.localized(command)
        assert await node.localized(command) == command

    asyncio.run(scenario())


def test_the_pool_of_an_instance_is_reached_through_its_own_node() -> None:
    node = Node("id", "10.0.0.2", None)
    node.way_into_pool = {"owner_address": "10.0.0.2:5000"}
    pool = FleetPool.between(1 << 20, block_bytes=10, block_size=2).settings
    settings = InstanceSettings(config=RolloutConfig(model="m"), pool=pool)
    fitted = node.fitted(InstanceSpec(factory="f", settings=settings)).settings
    assert isinstance(fitted, InstanceSettings)
    assert fitted.pool == {**pool, "owner_address": "10.0.0.2:5000"}
    none = InstanceSpec(factory="f", settings=replace(settings, pool=None))
    assert node.fitted(none) is none


def test_a_nodes_part_of_the_pool_uses_the_protocol_that_was_set(monkeypatch: pytest.MonkeyPatch) -> None:
    configs: list[Any] = []

    class Keeper:
        def __init__(self, config: Any) -> None:
            configs.append(config)
            self.servers = SimpleNamespace(owner_address="10.0.0.2:5000", master_address="10.0.0.1:1")

        def stop(self) -> None:
            """Nothing was started."""

    monkeypatch.setattr("seer.kvpool.mooncake_keeper.MooncakeKeeper", Keeper)
    monkeypatch.setattr("seer.hosting.ray.pool.MooncakeKeeper", Keeper)
    pool = NodesPool(64 << 20, block_bytes=4096, protocol="rdma")
    pool.start("10.0.0.1")
    agent = NodeAgent(lease_s=60.0)
    node = Node("id", "10.0.0.2", InProcess(agent, sees=False))
    asyncio.run(node.start_store(pool))
    agent.close()
    assert [config.protocol for config in configs if config.dram_bytes] == ["rdma"]


def test_an_error_of_an_actor_keeps_its_class() -> None:
    wrapped = RuntimeError("a page of text")
    wrapped.cause = PoolError("no memory")  # type: ignore[attr-defined]  # as Ray does it
    assert isinstance(plain_error(wrapped, "what"), PoolError)
    assert str(plain_error(RuntimeError("it died\nat length"), "what")) == "what: it died"


def test_the_log_of_another_machine_is_copied_and_a_lost_machine_loses_no_more_than_its_end(tmp_path: Path) -> None:
    written = b"first line\n"

    async def read(offset: int) -> tuple[int, bytes]:
        if offset >= 20:
            raise RuntimeError("the node is gone")
        part = written[offset : offset + 4]
        return offset + len(part), part

    async def scenario() -> None:
        nonlocal written
        copy = LogCopy("instance-0", tmp_path, read)
        copy.copy_soon()
        assert copy._copying is not None
        await copy._copying
        assert (tmp_path / "instance-0.log").read_bytes() == b"first line\n"
        copy.copy_soon()
        written += b"and a second line, longer\n"
        await copy.finish(5.0)
        await copy.finish(5.0)

    asyncio.run(scenario())
    assert (tmp_path / "instance-0.log").read_bytes() == b"first line\nand a second"
    asyncio.run(LogCopy("none", None, read).finish(1.0))


def test_a_draft_server_listens_where_it_is_told() -> None:
    async def scenario() -> None:
        server = DraftServerProcess(host="127.0.0.1")
        await server.start()
        assert server.address.startswith("tcp://127.0.0.1:")
        await server.close()

    asyncio.run(scenario())


def test_a_master_and_an_owner_can_run_apart() -> None:
    needs_mooncake()
    from seer.kvpool.mooncake_keeper import MooncakeKeeper
    from seer.kvpool.mooncake_servers import MooncakeServersConfig

    with pytest.raises(ConfigError, match="nothing to start"):
        MooncakeServersConfig(dram_bytes=0, master_address="10.0.0.1:1")
    master = MooncakeKeeper(MooncakeServersConfig(dram_bytes=0))
    owner = MooncakeKeeper(MooncakeServersConfig(dram_bytes=16 << 20, master_address=master.servers.master_address))
    pids = [*master.servers.pids.values(), *owner.servers.pids.values()]
    assert (list(master.servers.pids), list(owner.servers.pids)) == (["master"], ["owner"])
    owner.stop()
    master.stop()
    assert not [pid for pid in pids if Path(f"/proc/{pid}").exists()]
    with pytest.raises(PoolError):
        MooncakeKeeper(MooncakeServersConfig(dram_bytes=0, host="203.0.113.9"))
