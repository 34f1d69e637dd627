# SPDX-License-Identifier: Apache-2.0
"""The endpoints of weight updates: vLLM's (TRL and SkyRL call them), prime-rl's, SGLang's, and TRL's older ones.

POST /update_weights   {"update_info": {names, dtype_names, shapes}}   tensors by broadcast, between start and finish
                       {"weight_dir": PATH} or {"path": PATH}          a folder or file under --weights-dir
POST /update_weights_from_disk {"model_path": PATH}                    SGLang's form of the same
"""

from __future__ import annotations

from typing import Annotated, Any

import msgspec
from msgspec import Meta
from starlette.requests import Request
from starlette.responses import Response

from seer.ranges import CountOrZero
from seer.serve.refusals import bad_request, json_response
from seer.serve.service import Service
from seer.serve.weight_group import InitInfo, TensorInfo

Shape = Annotated[list[CountOrZero], Meta(max_length=8)]


class UpdateInfo(msgspec.Struct, kw_only=True):
    """Tensors that a trainer is about to broadcast, in this order."""

    names: Annotated[list[str], Meta(min_length=1)]
    dtype_names: list[str]
    shapes: list[Shape]
    packed: bool = True

    def tensors(self) -> list[TensorInfo]:
        """One by one."""
        if not len(self.names) == len(self.dtype_names) == len(self.shapes):
            raise bad_request(
                f"{len(self.names)} names, {len(self.dtype_names)} dtypes and {len(self.shapes)} shapes",
                param="update_info",
            )
        rows = zip(self.names, self.dtype_names, self.shapes, strict=True)
        return [TensorInfo(name, dtype, tuple(shape)) for name, dtype, shape in rows]


class UpdateRequest(msgspec.Struct, kw_only=True):
    """Body of /update_weights: one of its fields."""

    update_info: UpdateInfo | None = None
    weight_dir: str | None = None
    path: str | None = None
    model_path: str | None = None


class InitRequest(msgspec.Struct, kw_only=True):
    """Body of /init_weight_transfer_engine."""

    init_info: InitInfo


async def init_group(service: Service, request: Request) -> Response:
    """POST /init_weight_transfer_engine: join the trainer's group."""
    asked = await service.read(request, InitRequest)
    await service.group.join(asked.init_info)
    return json_response({"message": "Weight transfer initialized"})


async def close_group(service: Service, request: Request) -> Response:
    """POST /shutdown_weight_transfer_engine: leave the trainer's group."""
    await service.group.leave()
    service.weights.drop()
    return json_response({"message": "Weight transfer shut down"})


async def start_update(service: Service, request: Request) -> Response:
    """POST /start_weight_update."""
    service.weights.start()
    return json_response({"message": "Weight update started"})


async def update_weights(service: Service, request: Request) -> Response:
    """POST /update_weights and /update_weights_from_disk."""
    asked = await service.read(request, UpdateRequest)
    paths = [path for path in (asked.path, asked.weight_dir, asked.model_path) if path is not None]
    if len(paths) + (asked.update_info is not None) != 1:
        raise bad_request("give exactly one of update_info, weight_dir, path and model_path", param="path")
    if paths:
        version = await service.weights.from_path(paths[0])
        return json_response({"status": "ok", "success": True, "weights_version": version})
    assert asked.update_info is not None, "one of the two is given"
    await receive_tensors(service, asked.update_info)
    return json_response({"message": "Weights updated"})


async def receive_tensors(service: Service, info: UpdateInfo) -> None:
    """Tensors that the trainer broadcasts, for the update that is under way."""
    tensors = info.tensors()
    update = service.weights.announce([tensor.num_bytes() for tensor in tensors])
    await service.weights.receive(update, service.group.receive(tensors))


async def finish_update(service: Service, request: Request) -> Response:
    """POST /finish_weight_update."""
    version = await service.weights.finish()
    return json_response({"message": "Weight update finished", "weights_version": version})


async def weight_info(service: Service, request: Request) -> Response:
    """GET /weight_info."""
    return json_response({"weight_version": str(service.backend.weights_version)})


async def get_world_size(service: Service, request: Request) -> Response:
    """GET /get_world_size: one rank receives for all instances."""
    return json_response({"world_size": 1})


async def server_info(service: Service, request: Request) -> Response:
    """GET /server_info: what TRL reads of vLLM's configuration, and slime of SGLang's."""
    model = {
        "model": service.backend.name,
        "max_model_len": service.backend.max_model_len,
        "logprobs_mode": "processed_logprobs",  # under the distribution that was sampled from
    }
    config: dict[str, Any] = {"weight_transfer_config": {"backend": service.group.backend}, "model_config": model}
    # One rank receives weights, and the memory of the instances stays theirs.
    sglang = {"tp_size": 1, "pp_size": 1, "disaggregation_mode": "null", "enable_memory_saver": False}
    return json_response({"vllm_config": config} | sglang)
