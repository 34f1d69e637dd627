# SPDX-License-Identifier: Apache-2.0
"""The endpoints of `trl vllm-serve`: batches of prompts, and weights tensor by tensor."""

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
from seer.serve.settings import ServeSettings
from served import MAX_MODEL_LEN, Served, a_server, expected_ids

TENSORS = {"a.weight": torch.arange(10, dtype=torch.float32).view(2, 5), "b.bias": torch.ones(3, dtype=torch.bfloat16)}
OF_V1 = {
    "n": 2,
    "max_tokens": 8,
    "logprobs": 0,
    "top_k": -1,
    "repetition_penalty": 1.0,
    "structured_outputs_regex": None,
}
SEED = {"generation_kwargs": {"seed": 7, "ignore_eos": True}}


def a_free_port() -> int:
    with socket.socket() as one:
        one.bind(("127.0.0.1", 0))
        return int(one.getsockname()[1])


def test_a_batch_is_answered_prompt_by_prompt_with_n_responses_each() -> None:
    async def scenario() -> None:
        async with a_server() as served:
            reply = await served.ok("/generate/", {"prompts": ["ab", "c"], "images": None} | OF_V1 | SEED)
            assert reply["prompt_ids"] == [[1, 2], [3]]
            ids = [expected_ids(7, i, 8, ignore_eos=True) for i in range(2)]
            assert reply["completion_ids"] == ids * 2
            assert reply["logprob_token_ids"] == [[[token] for token in one] for one in ids * 2]
            assert [len(one) for one in reply["logprobs"]] == [8] * 4
            assert all(isinstance(value, float) for one in reply["logprobs"] for [value] in one)
            of_ids = await served.ok("/generate/", {"prompts": [[1, 2], [3]]} | OF_V1 | SEED)
            assert of_ids["completion_ids"] == reply["completion_ids"]
            said = [[{"role": "user", "content": "ab"}], [{"role": "user", "content": "c"}]]
            chat = await served.ok("/chat/", {"messages": said, "tools": None} | OF_V1 | SEED)
            assert chat == reply

    asyncio.run(scenario())


def test_clients_without_the_field_logprobs_get_a_number_for_each_token_and_truncated_prompts() -> None:
    async def scenario() -> None:
        async with a_server() as served:
            body = {"prompts": ["abc"], "max_tokens": 4, "truncate_prompt_tokens": 2, "guided_decoding_regex": None}
            reply = await served.ok("/generate/", body | SEED)
            assert reply["prompt_ids"] == [[2, 3]]
            assert all(isinstance(value, float) for value in reply["logprobs"][0])
            assert len(reply["logprobs"][0]) == 4
            assert (await served.ok("/generate/", body | SEED | {"logprobs": None}))["logprobs"] is None

    asyncio.run(scenario())


def test_generation_kwargs_truncate_prompts_too() -> None:
    async def scenario() -> None:
        async with a_server() as served:
            kwargs = {"truncate_prompt_tokens": 2}
            for prompt in ("abc", "c" * 10 * MAX_MODEL_LEN + "bc", [1, 2, 3]):
                body = {"prompts": [prompt], "max_tokens": 4, "generation_kwargs": kwargs}
                assert (await served.ok("/generate/", body))["prompt_ids"] == [[2, 3]]

    asyncio.run(scenario())


@pytest.mark.parametrize(
    "bad",
    [
        {"prompts": []},
        *({"prompts": ["abc"], "truncate_prompt_tokens": num} for num in (0, -2, "two")),
        *({"prompts": ["abc"], "generation_kwargs": {"truncate_prompt_tokens": num}} for num in (0, -2, "two")),
        {"prompts": [""]},
        {"prompts": [[]]},
        {"prompts": ["a"], "images": [["x"]]},
        {"prompts": ["a"], "logprobs": 5},
        {"prompts": ["a"], "structured_outputs_regex": "a*"},
        {"prompts": ["a"], "guided_decoding_regex": "a*"},
        {"prompts": ["a"], "generation_kwargs": {"presence_penalty": 1.0}},
        {"prompts": ["a"], "generation_kwargs": {"unknown": 1}},
    ],
)
def test_what_is_not_supported_is_refused(bad: dict[str, Any]) -> None:
    async def scenario() -> None:
        async with a_server() as served:
            assert (await served.post("/generate/", bad)).status_code == 400

    asyncio.run(scenario())


class Trainer:
    """Rank 1, in a thread; joins and broadcasts after the server has answered."""

    def __init__(self, served: Served, port: int) -> None:
        self._served, self._port = served, port
        self._thread = ThreadPoolExecutor(max_workers=1)
        self._group: Any = None

    async def join(self) -> None:
        body = {"host": "0.0.0.0", "port": self._port, "world_size": 2, "client_device_uuid": "42"}
        await self._served.ok("/init_communicator/", body)
        self._group = await self._run(
            lambda: GlooGroup("127.0.0.1", self._port, rank=1, world_size=2, deadline=timedelta(seconds=60))
        )

    async def send(self, name: str) -> None:
        tensor = TENSORS[name]
        body = {"name": name, "dtype": str(tensor.dtype), "shape": list(tensor.shape)}
        await self._served.ok("/update_named_param/", body)
        await self._run(lambda: self._group.broadcast(tensor.clone(), src=1))

    async def _run(self, work: Any) -> Any:
        return await asyncio.get_running_loop().run_in_executor(self._thread, work)


@pytest.mark.parametrize("last", ["/reset_prefix_cache/", "/generate/", "/close_communicator/"])
def test_tensors_are_used_once_the_update_is_known_to_be_complete(last: str) -> None:
    async def scenario() -> None:
        async with a_server() as served:
            assert (await served.get("/health/")).status_code == 200
            assert (await served.get("/get_world_size/")).json() == {"world_size": 1}
            trainer = Trainer(served, a_free_port())
            await trainer.join()
            for name in TENSORS:
                await trainer.send(name)
            assert served.fleet.updates == []
            assert (await served.post("/v1/completions", {"prompt": "a"})).status_code == 503
            await served.ok(last, {"prompts": ["a"]} if last == "/generate/" else None)
            [weights] = served.fleet.updates
            assert isinstance(weights, dict)
            assert all(torch.equal(weights[name], tensor) for name, tensor in TENSORS.items())
            await served.ok("/reset_prefix_cache/")
            assert len(served.fleet.updates) == 1
            assert (await served.post("/v1/completions", {"prompt": "a"})).status_code == 200

    asyncio.run(scenario())


def test_what_went_wrong_after_an_answer_is_the_next_answer() -> None:
    async def scenario() -> None:
        async with a_server() as served:
            param = {"name": "a", "dtype": "torch.float32", "shape": [1]}
            assert "init_communicator" in (await served.post("/update_named_param/", param)).text
            with socket.create_server(("127.0.0.1", 0)) as taken:
                body = {"host": "0.0.0.0", "port": taken.getsockname()[1], "world_size": 2}
                await served.ok("/init_communicator/", body)
                await served.ok("/update_named_param/", param)
                response = await served.post("/reset_prefix_cache/")
            assert response.status_code == 400
            assert "the group with the trainer broke" in response.json()["error"]["message"]
            assert (await served.post("/v1/completions", {"prompt": "a"})).status_code == 200
            assert (await served.post("/init_communicator/", body | {"world_size": 3})).status_code == 400

    asyncio.run(scenario())


def test_weights_are_for_administrators() -> None:
    async def scenario() -> None:
        async with a_server(ServeSettings(keys=Keys(api="an-api-key-of-24-letters"))) as served:
            user = {"Authorization": "Bearer an-api-key-of-24-letters"}
            for path in ("/init_communicator/", "/update_named_param/", "/close_communicator/", "/reset_prefix_cache/"):
                assert (await served.post(path, {}, headers=user)).status_code == 403
            assert (await served.post("/generate/", {"prompts": ["a"]})).status_code == 401

    asyncio.run(scenario())
