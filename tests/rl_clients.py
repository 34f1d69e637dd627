# SPDX-License-Identifier: Apache-2.0
"""Clients that call a server as SkyRL, prime-rl and slime do, written from the fields of their sources.

SkyRL: skyrl/backends/skyrl_train/inference_servers/{remote_inference_client,engine_utils}.py, and
weight_sync/broadcast_strategy.py, whose NCCL is gloo here: the trainer is rank 0 and sends tensors packed as bytes
slime: slime/backends/sglang_utils/{external,sglang_engine,server_control}.py, slime/rollout/sglang_rollout.py and
slime/ray/actor_group.py, with --update-weight-transport disk
prime-rl: src/prime_rl/utils/client.py, and renderers/client.py of the package `renderers`, which it generates with
"""

from __future__ import annotations

import asyncio
import socket
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

import httpx
import openai
import torch

from seer.engine.gloo_group import GlooGroup


@dataclass(frozen=True)
class Rollouts:
    """What both read of a reply."""

    ids: list[list[int]]
    logprobs: list[list[float]]
    finish_reasons: list[str]
    texts: list[str]


class SkyRlClient:
    """The data plane and the control plane at one address."""

    def __init__(self, url: str, model: str) -> None:
        self._http = httpx.AsyncClient(base_url=url, timeout=120)
        self._model = model
        self._group: GlooGroup | None = None

    async def generate(
        self, prompts: Sequence[Sequence[int]], sampling: dict[str, Any], session_ids: Sequence[str]
    ) -> Rollouts:
        calls = [
            self._generate(prompt, sampling, session) for prompt, session in zip(prompts, session_ids, strict=True)
        ]
        choices = await asyncio.gather(*calls)
        texts = [(await self._post("/detokenize", {"model": self._model, "tokens": c["token_ids"]})) for c in choices]
        return Rollouts(
            [choice["token_ids"] for choice in choices],
            [[one["logprob"] for one in choice["logprobs"]["content"]] for choice in choices],
            [choice["finish_reason"] for choice in choices],
            [text["prompt"] for text in texts],
        )

    async def _generate(self, prompt: Sequence[int], sampling: dict[str, Any], session: str) -> dict[str, Any]:
        body = {"sampling_params": sampling, "model": self._model, "token_ids": list(prompt)}
        reply = await self._post("/inference/v1/generate", body, headers={"X-Session-ID": session})
        choice: dict[str, Any] = reply["choices"][0]
        return choice

    async def finish_session(self, session: str) -> None:
        await self._post("/finish_session", None, params={"session_id": session})

    async def pause(self) -> None:
        await self._post("/pause", None, params={"mode": "keep", "clear_cache": "false"})

    async def resume(self) -> None:
        await self._post("/resume", None)

    async def sleep(self) -> None:
        await self._post("/sleep", None, params={"level": "2"})

    async def wake_up(self) -> None:
        await self._post("/wake_up", None, params={"tags": ["weights"]})

    async def reset_prefix_cache(self) -> None:
        await self._post("/reset_prefix_cache", {"reset_running_requests": False})

    async def world_size(self) -> int:
        return int((await self._http.get("/get_world_size")).json()["world_size"])

    async def init_weight_sync(self) -> None:
        world_size = await self.world_size() + 1
        with socket.socket() as one:
            one.bind(("127.0.0.1", 0))
            port = one.getsockname()[1]
        place = {"master_address": "127.0.0.1", "master_port": port, "rank_offset": 1, "world_size": world_size}
        wait = timedelta(seconds=60)
        self._group, _ = await asyncio.gather(
            asyncio.to_thread(GlooGroup, "127.0.0.1", port, rank=0, world_size=world_size, deadline=wait),
            self._post("/init_weight_transfer_engine", {"init_info": place}),
        )

    async def sync_weights(self, weights: Mapping[str, torch.Tensor]) -> None:
        """As `save_weights_for_sampler` of a trainer that is not colocated."""
        assert self._group is not None
        await self.pause()
        try:
            await self.collective_rpc("skyrl_start_weight_update", {"is_checkpoint_format": True})
            info = {
                "names": list(weights),
                "dtype_names": [str(one.dtype).removeprefix("torch.") for one in weights.values()],
                "shapes": [list(one.shape) for one in weights.values()],
                "packed": True,
            }
            update = asyncio.create_task(self.collective_rpc("update_weights_nccl", {"update_info": info}))
            packed = torch.cat([one.contiguous().view(-1).view(torch.uint8) for one in weights.values()])
            await asyncio.to_thread(self._group.broadcast, packed, 0)
            await update
            await self.collective_rpc("skyrl_finish_weight_update")
        finally:
            await self.resume()

    async def collective_rpc(self, method: str, kwargs: dict[str, Any] | None = None) -> None:
        call: dict[str, Any] = {"method": method} | ({"kwargs": kwargs} if kwargs is not None else {})
        assert (await self._post("/collective_rpc", call)) == {"results": [None]}

    async def _post(self, path: str, body: Any, **settings: Any) -> Any:
        response = await self._http.post(path, json=body, **settings)
        response.raise_for_status()
        return response.json()

    async def close(self) -> None:
        await self._http.aclose()


class PrimeRlClient:
    """The inference pool: generation by an OpenAI client, administration beside it."""

    def __init__(self, url: str, model: str, api_key: str = "EMPTY") -> None:
        self._client = openai.AsyncOpenAI(base_url=f"{url}/v1", api_key=api_key, max_retries=0)
        headers = {"Authorization": f"Bearer {api_key}"} if api_key != "EMPTY" else {}
        self._admin = httpx.AsyncClient(base_url=url, headers=headers, timeout=None)
        self._endpoint = f"{url}/inference/v1/generate"
        self._model = model

    async def wait_for_ready(self) -> int:
        """Returns the longest context, which the renderer asks for."""
        (await self._admin.get("/health")).raise_for_status()
        cards = (await self._admin.get("/v1/models")).json()["data"]
        [card] = [card for card in cards if card["id"] == self._model]
        return int(card["max_model_len"])

    async def generate(
        self, prompt: Sequence[int], sampling: dict[str, Any], *, trajectory: str, step: int
    ) -> Rollouts:
        sampling = sampling | {"stop_token_ids": [2], "logprobs": 1, "skip_special_tokens": False}
        body: dict[str, Any] = {"model": self._model, "token_ids": list(prompt), "sampling_params": sampling}
        body |= {"cache_salt": str(step), "priority": step}
        response = await self._client.post(
            self._endpoint, cast_to=httpx.Response, body=body, options={"headers": {"X-Session-ID": trajectory}}
        )
        data = response.json()
        choice = data["choices"][0]
        assert data["request_id"]
        logprobs = [float(one.get("logprob") or 0.0) for one in choice["logprobs"]["content"]]
        return Rollouts([choice["token_ids"]], [logprobs], [choice["finish_reason"]], [])

    async def update_weights(self, weight_dir: str) -> None:
        await self._admin_post("/pause", params={"mode": "keep", "clear_cache": "false"})
        try:
            await self._admin_post("/update_weights", json={"weight_dir": weight_dir})
        finally:
            await self._admin_post("/resume")

    async def _admin_post(self, path: str, **settings: Any) -> None:
        (await self._admin.post(path, **settings)).raise_for_status()

    async def close(self) -> None:
        await self._client.close()
        await self._admin.aclose()


class SlimeClient:
    """An external engine that is the router, too; the two have one address."""

    def __init__(self, url: str) -> None:
        self._url = url
        self._http = httpx.AsyncClient(base_url=url, timeout=120)
        self._version = 0

    async def start(self) -> None:
        (await self._http.get("/health_generate")).raise_for_status()
        info = (await self._http.get("/server_info")).json()
        assert (int(info.get("tp_size") or 0), info.get("disaggregation_mode")) == (1, "null")
        assert info.get("enable_memory_saver") is False  # as --offload-rollout
        await self._post("/workers", {"url": self._url, "worker_type": "regular"})

    async def generate(self, prompt: Sequence[int], **settings: Any) -> tuple[list[int], str]:
        """Tokens, and the version of the weights."""
        sampling = {"temperature": 1.0, "top_p": 1.0, "top_k": -1, "stop": None, "stop_token_ids": None}
        sampling |= {"skip_special_tokens": True, "no_stop_trim": True, "spaces_between_special_tokens": False}
        body = {"sampling_params": sampling | settings, "return_logprob": True, "input_ids": list(prompt)}
        meta = (await self._post("/generate", body))["meta_info"]
        return [item[1] for item in meta["output_token_logprobs"]], meta["weight_version"]

    async def abort(self) -> int:
        """End the rollout step; returns what is left in flight."""
        workers = (await self._http.get("/workers")).json()["workers"]
        [url] = [worker["url"] for worker in workers]
        await self._post(f"{url}/abort_request", {"abort_all": True})
        loads = (await self._http.get(f"{url}/v1/loads?include=core")).json()["loads"]
        return sum(load["num_total_reqs"] for load in loads)

    async def update_weights(self, folder: str) -> None:
        self._version += 1
        await self._post("/pause_generation", {})
        assert (await self._http.get("/flush_cache")).status_code == 200
        body = {"model_path": folder, "weight_version": str(self._version)}
        await self._post("/update_weights_from_disk", body)
        await self._post("/continue_generation", {})

    async def weight_version(self) -> str:
        return str((await self._http.get("/get_weight_version")).json()["weight_version"])

    async def close(self) -> None:
        await self._http.aclose()

    async def _post(self, path: str, body: Any) -> Any:
        response = await self._http.post(path, json=body)
        response.raise_for_status()
        return response.json()
