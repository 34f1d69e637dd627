# SPDX-License-Identifier: Apache-2.0
"""A client that calls a server as TRL's `VLLMClient` called `trl vllm-serve`, written from the fields of its sources.

trl/extras/vllm_client.py of 0.16 to 0.26 and trl/generation/vllm_client.py of 0.28 to 1.9. Those broadcast over NCCL;
here it is gloo. The server is rank 0, and the client the last rank.
"""

from __future__ import annotations

from collections.abc import Mapping
from datetime import timedelta
from typing import Any

import httpx

from seer.engine.gloo_group import GlooGroup


class TrlServeClient:
    """As a trainer has it."""

    def __init__(self, url: str, group_port: int) -> None:
        self._http = httpx.Client(base_url=url, timeout=120)
        self._group_port = group_port
        self._rank = 0
        self._group: GlooGroup | None = None

    def check_server(self) -> bool:
        return self._http.get("/health/").status_code == 200

    def generate(self, prompts: list[Any], **settings: Any) -> dict[str, Any]:
        return self._post("/generate/", {"prompts": prompts, "images": None, "generation_kwargs": {}} | settings)

    def chat(self, messages: list[Any], **settings: Any) -> dict[str, Any]:
        body: dict[str, Any] = {
            "messages": messages,
            "generation_kwargs": {},
            "chat_template_kwargs": {},
            "tools": None,
        }
        return self._post("/chat/", body | settings)

    def init_communicator(self) -> None:
        self._rank = self._http.get("/get_world_size/").json()["world_size"]
        body = {"host": "0.0.0.0", "port": self._group_port, "world_size": self._rank + 1, "client_device_uuid": "42"}
        self._post("/init_communicator/", body)
        wait = timedelta(seconds=60)
        self._group = GlooGroup(
            "127.0.0.1", self._group_port, rank=self._rank, world_size=self._rank + 1, deadline=wait
        )

    def update_named_param(self, name: str, weights: Any) -> None:
        assert self._group is not None
        body = {"name": name, "dtype": str(weights.dtype), "shape": tuple(weights.shape)}
        self._post("/update_named_param/", body)
        self._group.broadcast(weights, src=self._rank)
        self._group.barrier()

    def update_model_params(self, params: Mapping[str, Any]) -> None:
        for name, tensor in params.items():
            self.update_named_param(name, tensor)

    def reset_prefix_cache(self) -> None:
        self._post("/reset_prefix_cache/", None)

    def close_communicator(self) -> None:
        self._post("/close_communicator/", None)
        self._group = None

    def close(self) -> None:
        self._http.close()

    def _post(self, path: str, body: Any) -> dict[str, Any]:
        response = self._http.post(path, json=body)
        if response.status_code != 200:
            raise RuntimeError(f"Request failed: {response.status_code}, {response.text}")
        value: dict[str, Any] = response.json()
        return value
