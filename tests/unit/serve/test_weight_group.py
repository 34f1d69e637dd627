# SPDX-License-Identifier: Apache-2.0
"""Weights by broadcast: buffers are cut as the trainer cuts them, and tensors arrive as they were sent."""

from __future__ import annotations

import asyncio
import socket
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta
from typing import Any

import pytest

pytest.importorskip("fastapi")
torch = pytest.importorskip("torch")

from seer.engine.gloo_group import GlooGroup
from seer.serve.keys import Keys
from seer.serve.refusals import Refusal
from seer.serve.settings import ServeSettings
from seer.serve.weight_group import InitInfo, TensorInfo, WeightGroup, buffers
from served import a_server

TENSORS = {
    "a.weight": torch.arange(10, dtype=torch.float32).view(2, 5),
    "b.bias": torch.tensor([1.5, -2.0, 3.0], dtype=torch.bfloat16),
    "c.scalar": torch.tensor(7, dtype=torch.int64),
    "d.mask": torch.tensor([True, False, True]),
}


def info_of(name: str) -> TensorInfo:
    return TensorInfo(name, str(TENSORS[name].dtype).removeprefix("torch."), tuple(TENSORS[name].shape))


def a_free_port() -> int:
    with socket.socket() as one:
        one.bind(("127.0.0.1", 0))
        return int(one.getsockname()[1])


class Trainer:
    """Rank 0 of the group; broadcasts each buffer in a thread, as TRL does."""

    def __init__(self, port: int) -> None:
        self._thread = ThreadPoolExecutor(max_workers=1)
        self._group = self._thread.submit(
            lambda: GlooGroup("127.0.0.1", port, rank=0, world_size=2, deadline=timedelta(seconds=60))
        )

    def send(self, batches: list[list[str]]) -> Any:
        def work() -> None:
            for names in batches:
                parts = [TENSORS[name].contiguous().view(-1).view(torch.uint8) for name in names]
                self._group.result().broadcast(torch.cat(parts), src=0)

        return self._thread.submit(work)


def test_the_first_rank_listens_on_its_own_address_alone() -> None:
    port = a_free_port()
    trainer = Trainer(port)
    while True:
        try:
            socket.create_connection(("127.0.0.1", port)).close()
            break
        except ConnectionRefusedError:
            continue
    with pytest.raises(ConnectionRefusedError):
        socket.create_connection(("127.0.0.2", port))
    GlooGroup("127.0.0.1", port, rank=1, world_size=2, deadline=timedelta(seconds=60))
    trainer.send([]).result()


def test_the_tensor_that_exceeds_a_buffer_is_its_last() -> None:
    infos = [info_of(name) for name in TENSORS]  # of 40, 6, 8 and 3 bytes
    assert [[one.name[0] for one in batch] for batch in buffers(infos, 100)] == [["a", "b", "c", "d"]]
    assert [[one.name[0] for one in batch] for batch in buffers(infos, 40)] == [["a", "b"], ["c", "d"]]
    assert [[one.name[0] for one in batch] for batch in buffers(infos, 39)] == [["a"], ["b", "c", "d"]]


@pytest.mark.filterwarnings("ignore:Tensor '.*' has size")
def test_vllm_cuts_buffers_in_the_same_way() -> None:
    packing = pytest.importorskip("vllm.distributed.weight_transfer.packed_tensor")
    for size in (1, 5, 39, 40, 45, 46, 60):
        rest = iter(TENSORS.items())
        cut = []
        while (chunk := packing.pack_tensors(rest, lambda item: item[1], size)) is not None:
            cut.append(list(chunk.names))
        assert [[one.name for one in batch] for batch in buffers([info_of(n) for n in TENSORS], size)] == cut


@pytest.mark.parametrize("size", [1, 40, 1 << 30])
def test_tensors_arrive_as_they_were_sent(size: int) -> None:
    async def scenario() -> None:
        port = a_free_port()
        group, trainer = WeightGroup(backend="gloo", max_bytes=1 << 20), Trainer(port)
        meeting = InitInfo(master_address="127.0.0.1", master_port=port, rank_offset=1, world_size=2)
        meeting.packed_buffer_size_bytes = size
        await group.join(meeting)
        infos = [info_of(name) for name in TENSORS]
        sent = trainer.send([[one.name for one in batch] for batch in buffers(infos, size)])
        received = await group.receive(infos)
        sent.result()
        assert received.keys() == TENSORS.keys()
        for name, tensor in TENSORS.items():
            assert received[name].dtype == tensor.dtype
            assert torch.equal(received[name], tensor)

    asyncio.run(scenario())


def test_what_cannot_be_received_is_refused_before_the_trainer_is_waited_for() -> None:
    async def scenario() -> None:
        group = WeightGroup(backend="gloo", max_bytes=1000)
        group._communicator = object()  # type: ignore[assignment]
        for bad in (TensorInfo("x", "float32", (1 << 20, 1 << 10)), TensorInfo("x", "__class__", (1,))):
            with pytest.raises(Refusal):
                await group.receive([bad])
        await group.leave()
        with pytest.raises(Refusal, match="no group"):
            await group.receive([TensorInfo("x", "float32", (1,))])

    asyncio.run(scenario())


def test_an_update_changes_the_instances_only_when_it_is_finished() -> None:
    async def scenario() -> None:
        async with a_server() as served:
            port = a_free_port()
            trainer = Trainer(port)
            meeting = {"master_address": "127.0.0.1", "master_port": port, "rank_offset": 1, "world_size": 2}
            await served.ok("/init_weight_transfer_engine", {"init_info": meeting | {"packed": True}})
            await served.ok("/start_weight_update", {})
            for name in TENSORS:
                one = info_of(name)
                body = {"names": [name], "dtype_names": [one.dtype], "shapes": [list(one.shape)]}
                sent = trainer.send([[name]])
                await served.ok("/update_weights", {"update_info": body})
                sent.result()
            assert served.fleet.updates == []
            reply = await served.ok("/finish_weight_update", {})
            assert reply["weights_version"] == 1
            [weights] = served.fleet.updates
            assert isinstance(weights, dict)
            assert all(torch.equal(weights[name], tensor) for name, tensor in TENSORS.items())
            assert (await served.post("/v1/completions", {"prompt": "a"})).status_code == 200
            uneven = {"names": ["a"], "dtype_names": [], "shapes": [[1]]}
            await served.ok("/start_weight_update", {})
            assert (await served.post("/update_weights", {"update_info": uneven})).status_code == 400
            assert (await served.post("/finish_weight_update", {})).status_code == 400

    asyncio.run(scenario())


def test_skyrl_calls_methods_of_a_table_and_no_other() -> None:
    async def scenario() -> None:
        async with a_server() as served:

            async def refused(body: Any) -> str:
                response = await served.post("/collective_rpc", body)
                assert response.status_code == 400
                return str(response.json()["error"]["message"])

            assert "no method 'load_model'" in await refused({"method": "load_model", "args": ["/"]})
            assert "skyrl_start_weight_update" in await refused({"method": "__class__"})
            assert "colocate_all=false" in await refused({"method": "update_weights_ipc", "kwargs": {}})
            start = {"method": "skyrl_start_weight_update"}
            assert "is_checkpoint_format" in await refused(start | {"kwargs": {"is_checkpoint_format": False}})
            assert "kwargs" in await refused(start | {"args": [True]})
            assert "update_info" in await refused({"method": "update_weights_nccl", "kwargs": {}})
            assert "no weight update was started" in await refused({"method": "skyrl_finish_weight_update"})
            assert not served.service.weights.is_started
            assert await served.ok("/collective_rpc", start) == {"results": [None]}
            assert served.service.weights.is_started

    asyncio.run(scenario())


def test_methods_of_workers_are_for_administrators() -> None:
    async def scenario() -> None:
        async with a_server(ServeSettings(keys=Keys(api="an-api-key-of-24-letters"))) as served:
            user = {"Authorization": "Bearer an-api-key-of-24-letters"}
            body = {"method": "skyrl_start_weight_update"}
            assert (await served.post("/collective_rpc", body, headers=user)).status_code == 403

    asyncio.run(scenario())


MEETING = {"master_address": "127.0.0.1", "master_port": 9, "rank_offset": 1, "world_size": 2}


def test_nccl_needs_an_administrative_key() -> None:
    """It connects to an address that the request names."""

    async def scenario() -> None:
        async with a_server(ServeSettings(weight_backend="nccl")) as served:
            for path, body in (
                ("/init_weight_transfer_engine", {"init_info": MEETING}),
                ("/init_communicator/", {"host": "0.0.0.0", "port": 9, "world_size": 2}),
            ):
                response = await served.post(path, body)
                assert response.status_code == 403, response.text
                assert "--admin-key-file" in response.json()["error"]["message"]

    asyncio.run(scenario())


@pytest.mark.parametrize(("ours", "theirs"), [("gloo", "nccl"), ("nccl", "gloo")])
def test_a_client_does_not_choose_how_the_server_receives(ours: Any, theirs: str) -> None:
    async def scenario() -> None:
        keys = Keys(admin="a-key-of-some-24-letters")
        async with a_server(ServeSettings(weight_backend=ours, keys=keys)) as served:
            headers = {"Authorization": f"Bearer {keys.admin}"}
            body = {"init_info": MEETING | {"backend": theirs}}
            response = await served.post("/init_weight_transfer_engine", body, headers=headers)
            assert response.status_code == 400
            assert f"this server receives over {ours}" in response.json()["error"]["message"]

    asyncio.run(scenario())
