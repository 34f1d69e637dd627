# SPDX-License-Identifier: Apache-2.0
"""The weight endpoints of `trl vllm-serve`, which TRL's client called before it spoke to vLLM's own server.

The server is rank 0 of the group and the trainer rank 1. TRL asks the server to listen on every address; it listens on
loopback where it serves on loopback.
"""

from __future__ import annotations

from typing import Annotated

import msgspec
from msgspec import Meta
from starlette.requests import Request
from starlette.responses import Response

from seer.machine.addresses import LOOPBACK
from seer.ranges import Port
from seer.serve.keys import is_loopback
from seer.serve.refusals import json_response
from seer.serve.service import Service
from seer.serve.weight_endpoints import Shape
from seer.serve.weight_group import Meeting, TensorInfo


class InitCommunicator(msgspec.Struct, kw_only=True):
    """Body of /init_communicator/."""

    host: str
    port: Port
    world_size: Annotated[int, Meta(ge=2, le=2)]
    client_device_uuid: str | None = None
    """Of the trainer's GPU; TRL before 0.20 does not send it."""


class NamedParam(msgspec.Struct, kw_only=True):
    """Body of /update_named_param/."""

    name: str
    dtype: str
    shape: Shape


async def get_tensor_parallel_size(service: Service, request: Request) -> Response:
    """GET /get_tensor_parallel_size/, which TRL 0.16 asks for: one rank receives for all instances."""
    return json_response({"tensor_parallel_size": 1})


async def init_communicator(service: Service, request: Request) -> Response:
    """POST /init_communicator/: answered at once; the trainer comes after it."""
    asked = await service.read(request, InitCommunicator)
    service.group.refuse_without_key()
    service.group.refuse_same_device(asked.client_device_uuid)
    host = LOOPBACK if is_loopback(service.settings.host) else asked.host
    service.named_params.meet(Meeting(host=host, port=asked.port, rank=0))
    return json_response({"message": "Request received, initializing communicator"})


async def update_named_param(service: Service, request: Request) -> Response:
    """POST /update_named_param/: answered at once; the trainer broadcasts the tensor after it."""
    asked = await service.read(request, NamedParam)
    tensor = TensorInfo(asked.name, asked.dtype.removeprefix("torch."), tuple(asked.shape))
    service.named_params.take(tensor)
    return json_response({"message": "Request received, updating named parameter"})


async def close_communicator(service: Service, request: Request) -> Response:
    """POST /close_communicator/."""
    await service.named_params.leave()
    return json_response({"message": "Request received, closing communicator"})
