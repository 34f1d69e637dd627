# SPDX-License-Identifier: Apache-2.0
"""Starts on a cluster that fail or are cancelled leave nothing, and Ray's slow calls are made in threads."""

from __future__ import annotations

import asyncio
import threading
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest

from seer.config import HostingConfig
from seer.engine.prepare import InstanceSpec
from seer.errors import InstanceError
from seer.hosting.devices import InstanceDevices, InstanceNeeds
from seer.hosting.ray.cluster import RayCluster
from seer.hosting.ray.launcher import RayLauncher
from seer.hosting.ray.placement import Place, Placer
from seer.hosting.ray.pool import NodesPool

BUNDLE = {"CPU": 1.0}


class Groups(Placer):
    """Placement groups that are only noted."""

    def __init__(self) -> None:
        super().__init__(cast(RayCluster, SimpleNamespace()))
        self.threads: set[int] = set()
        self.given_back: list[Any] = []
        self.may_reserve = threading.Event()
        self.may_reserve.set()
        self.is_reserving = threading.Event()
        self.bundles: list[dict[str, float]] = []

    def _reserve(self, name: str, bundle: dict[str, float], avoid: list[str]) -> Any:
        self.bundles.append(bundle)
        self.threads.add(threading.get_ident())
        self.is_reserving.set()
        self.may_reserve.wait()
        return SimpleNamespace(wait=lambda deadline_s: True)

    def _node_of(self, group: Any) -> str:
        self.threads.add(threading.get_ident())
        return "node"

    def give_back(self, group: Any) -> None:
        self.given_back.append(group)


def test_places_are_asked_for_in_threads() -> None:
    async def scenario() -> None:
        groups = Groups()
        assert (await groups.place("one", BUNDLE, 60.0)).node == "node"
        assert threading.get_ident() not in groups.threads

    asyncio.run(scenario())


async def cancelled_while_reserving(groups: Groups) -> None:
    groups.may_reserve.clear()
    placing = asyncio.create_task(groups.place("one", BUNDLE, 60.0))
    await asyncio.to_thread(groups.is_reserving.wait)
    placing.cancel()
    await asyncio.sleep(0)
    groups.may_reserve.set()
    with pytest.raises(asyncio.CancelledError):
        await placing


def test_a_place_that_comes_after_its_start_was_cancelled_is_given_back() -> None:
    groups = Groups()
    asyncio.run(cancelled_while_reserving(groups))
    assert len(groups.given_back) == 1


def test_a_start_that_was_cancelled_is_over_also_where_the_cluster_fails_then() -> None:
    """Its supervisor waits for its end: another error would be one to try again after."""

    class Failing(Groups):
        def _reserve(self, name: str, bundle: dict[str, float], avoid: list[str]) -> Any:
            super()._reserve(name, bundle, avoid)
            raise ConnectionError("the head of the cluster is gone")

    asyncio.run(cancelled_while_reserving(Failing()))


def test_a_log_that_cannot_be_written_leaves_no_actor(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "taken").write_text("a file, where a folder should be")
    calls: list[str] = []

    class Actor:
        def __init__(self, cluster: Any, placer: Any, place: Place, *_: Any) -> None:
            calls.append("made")

        async def read_log(self, offset: int) -> tuple[int, bytes]:
            return offset, b""

        async def release(self) -> None:
            calls.append("released")

    monkeypatch.setattr("seer.hosting.ray.launcher.HostActor", Actor)
    launcher = RayLauncher(cast(Any, None), cast(Any, None), cast(Any, None))
    launcher._placer = groups = Groups()
    devices = InstanceDevices(needs=InstanceNeeds(num_gpus=4))
    options = HostingConfig(log_dir=tmp_path / "taken")
    with pytest.raises(InstanceError, match=r"instance-3 cannot be started on its node: .*File exists"):
        asyncio.run(launcher.launch(3, InstanceSpec(factory="f", settings={}), devices, options))
    assert calls == ["made", "released"]
    assert groups.bundles == [{"CPU": 1.0, "GPU": 4.0}], "its place is asked for by its own needs"


def launching(launcher: RayLauncher) -> Any:
    return launcher.launch(3, InstanceSpec(factory="f", settings={}), InstanceDevices(), HostingConfig())


def test_a_cluster_that_gives_no_place_or_actor_is_a_start_that_failed(monkeypatch: pytest.MonkeyPatch) -> None:
    """Such a start is tried again; any other error would leave the instance down for good."""

    def no_answer(*_: Any) -> Any:
        raise RuntimeError("the head does not answer\nand more")

    launcher = RayLauncher(cast(Any, None), cast(Any, None), cast(Any, None))
    launcher._placer = groups = Groups()
    monkeypatch.setattr("seer.hosting.ray.launcher.HostActor", no_answer)
    with pytest.raises(InstanceError, match=r"instance-3 cannot be started on its node: the head does not answer$"):
        asyncio.run(launching(launcher))
    assert len(groups.given_back) == 1
    monkeypatch.setattr(groups, "_reserve", no_answer)
    with pytest.raises(InstanceError, match=r"no place can be had for instance-3: the head does not answer$"):
        asyncio.run(launching(launcher))


class Ray:
    """A cluster that is joined when it may be."""

    def __init__(self) -> None:
        self.may_join, self.is_joining = threading.Event(), threading.Event()
        self.is_joined = False

    def is_initialized(self) -> bool:
        return self.is_joined

    def init(self, **_: Any) -> None:
        self.is_joining.set()
        self.may_join.wait()
        self.is_joined = True

    def shutdown(self) -> None:
        self.is_joined = False


def test_a_cluster_that_was_joined_after_the_start_was_cancelled_is_left(monkeypatch: pytest.MonkeyPatch) -> None:
    ray = Ray()
    monkeypatch.setattr("seer.hosting.ray.cluster.import_ray", lambda: ray)

    async def scenario() -> None:
        cluster = RayCluster("auto")
        connecting = asyncio.create_task(cluster.connect())
        await asyncio.to_thread(ray.is_joining.wait)
        connecting.cancel()  # its thread goes on
        with pytest.raises(asyncio.CancelledError):
            await connecting
        closing = asyncio.create_task(cluster.close())
        await asyncio.sleep(0)
        ray.may_join.set()
        await closing

    asyncio.run(scenario())
    assert not ray.is_joined


class Keeper:
    """A Mooncake master that starts when it may."""

    may_start = threading.Event()
    is_starting = threading.Event()
    running = 0

    def __init__(self, config: Any) -> None:
        self.is_starting.set()
        self.may_start.wait()
        Keeper.running += 1

    def stop(self) -> None:
        Keeper.running -= 1


def test_a_master_whose_start_was_cancelled_is_ended(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("seer.hosting.ray.pool.MooncakeKeeper", Keeper)

    async def scenario() -> None:
        pool = NodesPool(1 << 20, block_bytes=4096)
        starting = asyncio.create_task(asyncio.to_thread(pool.start, "127.0.0.1"))
        await asyncio.to_thread(Keeper.is_starting.wait)
        starting.cancel()  # its thread goes on
        stopping = asyncio.create_task(asyncio.to_thread(pool.stop))
        await asyncio.sleep(0)
        Keeper.may_start.set()
        await stopping
        assert Keeper.running == 0
        pool.start("127.0.0.1")  # a thread that comes late starts nothing
        assert Keeper.running == 0
        await asyncio.gather(starting, return_exceptions=True)

    asyncio.run(scenario())
