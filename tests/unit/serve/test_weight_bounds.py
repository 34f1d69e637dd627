# SPDX-License-Identifier: Apache-2.0
"""Weight updates have a size over all of their calls, a number of tensors that wait, and an end of waiting."""

from __future__ import annotations

import asyncio
from datetime import timedelta
from types import SimpleNamespace
from typing import Any

import pytest

pytest.importorskip("fastapi")
torch = pytest.importorskip("torch")

from seer.engine.vllm import nccl_group
from seer.engine.vllm.nccl_group import NcclGroup
from seer.errors import DeadlineExceeded
from seer.serve import named_params, weight_updates
from served import Served, a_server


class Silent:
    """A trainer that broadcasts at once."""

    device = "cpu"

    def broadcast(self, tensor: Any, src: int) -> None:
        pass

    def barrier(self) -> None:
        pass


def a_call(num_floats: int) -> dict[str, Any]:
    return {"update_info": {"names": ["a"], "dtype_names": ["float32"], "shapes": [[num_floats]]}}


def test_the_calls_of_an_update_have_one_size_for_all(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(weight_updates, "total_memory_bytes", lambda: 100)

    async def scenario() -> None:
        async with a_server() as served:
            served.service.group._communicator = Silent()
            await served.ok("/start_weight_update", {})
            await served.ok("/update_weights", a_call(20))
            refused = await served.post("/update_weights", a_call(6))
            assert refused.status_code == 400
            assert "2 tensors of 104 bytes" in refused.json()["error"]["message"]
            await served.ok("/update_weights", a_call(5))
            await served.ok("/start_weight_update", {})
            await served.ok("/update_weights", a_call(25))

    asyncio.run(scenario())


def test_an_update_has_a_number_of_tensors(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(weight_updates, "MAX_TENSORS", 2)

    async def scenario() -> None:
        async with a_server() as served:
            served.service.group._communicator = Silent()
            await served.ok("/start_weight_update", {})
            for status in (200, 200, 400):
                assert (await served.post("/update_weights", a_call(0))).status_code == status

    asyncio.run(scenario())


async def announce(served: Served) -> int:
    body = {"name": "a", "dtype": "torch.float32", "shape": [0]}
    return (await served.post("/update_named_param/", body)).status_code


def test_tensors_that_are_announced_and_not_broadcast_are_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(named_params, "MAX_WAITING", 3)

    async def scenario() -> None:
        async with a_server() as served:
            params, trainer_comes = served.service.named_params, asyncio.Event()

            async def met() -> None:
                await trainer_comes.wait()
                served.service.group._communicator = Silent()

            params._last = params._start(met())
            assert [await announce(served) for _ in range(4)] == [200, 200, 200, 429]
            trainer_comes.set()
            await served.ok("/reset_prefix_cache/")
            assert params._num_waiting == 0
            assert await announce(served) == 200
            await served.ok("/reset_prefix_cache/")

    asyncio.run(scenario())


@pytest.mark.parametrize("num_looks", [3, None])
def test_a_broadcast_over_nccl_has_a_deadline(num_looks: int | None, monkeypatch: pytest.MonkeyPatch) -> None:
    looks = 0

    class Event:
        def record(self, stream: object) -> None:
            pass

        def query(self) -> bool:
            nonlocal looks
            looks += 1
            return looks == num_looks

    if num_looks is None:
        monkeypatch.setattr(nccl_group, "BROADCAST_DEADLINE", timedelta(seconds=0))
    group: Any = NcclGroup.__new__(NcclGroup)  # without a GPU
    group._torch = SimpleNamespace(cuda=SimpleNamespace(current_stream=object, Event=Event))
    group._communicator = SimpleNamespace(broadcast=lambda tensor, src, stream: None)
    group._unfinished = []
    if num_looks is None:
        with pytest.raises(DeadlineExceeded, match="a broadcast of the trainer"):
            group.broadcast("a tensor", src=0)
        assert group._unfinished == ["a tensor"]
    else:
        group.broadcast("a tensor", src=0)
        assert looks == num_looks
