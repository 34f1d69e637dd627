# SPDX-License-Identifier: Apache-2.0
"""HTTP contracts of SkyRL, prime-rl, slime and older TRL against a `seer serve` process: groups, pauses and weights."""

from __future__ import annotations

import asyncio
import socket
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("fastapi")
pytest.importorskip("torch")
pytest.importorskip("openai")

from rl_clients import PrimeRlClient, SkyRlClient, SlimeClient
from seer import Prompt, Sampling, SyncRollout
from seer.engine.local.tiny import make_tiny_model
from serve_process import SMALL, ServeProcess, a_serve_process, make_served_model
from trl_serve_client import TrlServeClient

PROMPT = [72, 105, 33]
KEYS = {"api": "an-api-key-of-24-letters", "admin": "an-admin-key-of-26-letters"}
SKYRL: dict[str, Any] = {
    "min_tokens": 1,
    "skip_special_tokens": True,
    "include_stop_str_in_output": True,
    "max_tokens": 40,
    "temperature": 1.0,
    "top_p": 1.0,
    "top_k": -1,
    "min_p": 0.0,
    "logprobs": 0,
    "stop": None,
}


@pytest.fixture(scope="module")
def home(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("frameworks")
    make_served_model(folder / "tiny")
    make_tiny_model(folder / "weights" / "step-1", seed=1)
    make_tiny_model(folder / "weights" / "step-0")  # those that it starts with
    return folder


@pytest.fixture(scope="module")
def server(home: Path) -> Iterator[ServeProcess]:
    words = ("--model", str(home / "tiny"), "--served-model-name", "tiny", "--instances", "2", *SMALL)
    with a_serve_process(*words, "--weights-dir", str(home / "weights")) as served:
        yield served


def tokens_of(model: Path, seeds: range) -> list[list[int]]:
    prompts = [Prompt(token_ids=tuple(PROMPT), id=str(seed), seed=seed) for seed in seeds]
    with SyncRollout(model, instances=1, kv={"blocks": 512, "block_size": 4}) as rollout:
        groups = sorted(rollout.run(prompts, sampling=Sampling(max_tokens=40)), key=lambda group: group.group)
        return [group.responses[0].token_ids for group in groups]


def test_skyrl_generates_groups_pauses_and_sleeps(server: ServeProcess) -> None:
    async def scenario() -> None:
        client = SkyRlClient(server.url, "tiny")
        sessions = [f"uid-1_{rep}" for rep in range(6)]
        found = await client.generate([PROMPT] * 6, SKYRL, sessions)
        assert [len(ids) for ids in found.ids] == [len(values) for values in found.logprobs]
        assert set(found.finish_reasons) <= {"stop", "length"}
        assert found.texts == ["".join(map(chr, ids)) for ids in found.ids]
        assert len({tuple(ids) for ids in found.ids}) > 1  # siblings without a seed differ
        await client.pause()
        late = asyncio.create_task(client.generate([PROMPT], SKYRL, ["uid-1_6"]))
        await client.reset_prefix_cache()
        assert not late.done()
        await client.resume()
        assert (await late).ids
        await client.sleep()
        await client.wake_up()
        assert await client.world_size() == 1
        await client.finish_session("uid-1_0")
        await client.close()

    asyncio.run(scenario())


def test_skyrl_broadcasts_weights_between_two_steps(server: ServeProcess, home: Path) -> None:
    from safetensors.torch import load_file

    async def scenario() -> None:
        client = SkyRlClient(server.url, "tiny")
        await client.init_weight_sync()
        for folder in (home / "weights" / "step-1", home / "tiny"):
            await client.sync_weights(load_file(folder / "model.safetensors"))
            for seed, ids in enumerate(tokens_of(folder, range(2))):
                found = await client.generate([PROMPT], SKYRL | {"seed": seed}, [f"uid-2_{seed}"])
                assert found.ids == [ids]
        await client.close()

    asyncio.run(scenario())


def test_prime_rl_updates_weights_from_a_folder_while_trajectories_run(server: ServeProcess, home: Path) -> None:
    before, after = tokens_of(home / "tiny", range(4)), tokens_of(home / "weights" / "step-1", range(4))

    async def generate(client: PrimeRlClient, seed: int, step: int) -> list[int]:
        sampling = {"temperature": 1.0, "max_tokens": 40, "seed": seed, "repetition_penalty": 1.0}
        found = await client.generate(PROMPT, sampling, trajectory=f"t{seed}", step=step)
        return found.ids[0]

    async def scenario() -> None:
        client = PrimeRlClient(server.url, "tiny")
        assert await client.wait_for_ready() == 512
        running = [asyncio.create_task(generate(client, seed, 0)) for seed in range(4)]
        await asyncio.gather(running[0])
        await client.update_weights(str(home / "weights" / "step-1"))
        assert await asyncio.gather(*running) == before
        assert [await generate(client, seed, 1) for seed in range(4)] == after
        await client.close()

    asyncio.run(scenario())


def test_prime_rl_has_one_key_for_generation_and_administration(tmp_path: Path) -> None:
    for name, key in KEYS.items():
        (tmp_path / name).write_text(key)
        (tmp_path / name).chmod(0o600)
    words = ("--engine", "fake", "--model", "none", "--no-pin", "--weights-dir", str(tmp_path))
    files = ("--api-key-file", str(tmp_path / "api"), "--admin-key-file", str(tmp_path / "admin"))

    async def scenario(url: str) -> None:
        client = PrimeRlClient(url, "none", KEYS["admin"])
        assert await client.wait_for_ready() > 0
        assert (await client.generate(PROMPT, {"max_tokens": 5}, trajectory="t", step=0)).ids[0]
        await client.update_weights(str(tmp_path))
        await client.close()

    with a_serve_process(*words, *files) as served:
        asyncio.run(scenario(served.url))


def test_slime_registers_generates_and_updates_weights_from_disk(server: ServeProcess, home: Path) -> None:
    async def scenario() -> None:
        client = SlimeClient(server.url)
        await client.start()
        before = int(await client.weight_version())
        for number, folder in enumerate((home / "weights" / "step-1", home / "weights" / "step-0"), start=1):
            await client.update_weights(str(folder))
            assert int(await client.weight_version()) == before + number
            for seed, ids in enumerate(tokens_of(folder, range(2))):
                found = await client.generate(PROMPT, max_new_tokens=40, sampling_seed=seed)
                assert found == (ids, str(before + number))
        assert await client.abort() == 0
        await client.close()

    asyncio.run(scenario())


def test_trl_before_it_spoke_to_vllm_generates_and_sends_weights_tensor_by_tensor(
    server: ServeProcess, home: Path
) -> None:
    from safetensors.torch import load_file

    with socket.socket() as one:
        one.bind(("127.0.0.1", 0))
        client = TrlServeClient(server.url, one.getsockname()[1])
    assert client.check_server()
    client.init_communicator()
    for folder in (home / "weights" / "step-1", home / "tiny"):
        client.update_model_params(load_file(folder / "model.safetensors"))
        client.reset_prefix_cache()
        for seed, ids in enumerate(tokens_of(folder, range(2))):
            found = client.generate([PROMPT], n=1, max_tokens=40, logprobs=0, generation_kwargs={"seed": seed})
            assert found["completion_ids"] == [ids]
            assert [len(one) for one in found["logprobs"]] == [len(ids)]
    client.close_communicator()
    [text] = client.generate(["Hi!"], n=2, max_tokens=4, truncate_prompt_tokens=2)["prompt_ids"]
    assert text == PROMPT[1:]
    client.close()
