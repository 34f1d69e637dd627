# SPDX-License-Identifier: Apache-2.0
"""POST /collective_rpc as SkyRL calls it to broadcast weights: its three methods, each of them an endpoint of vLLM's.

    skyrl_start_weight_update    /start_weight_update
    update_weights_nccl          /update_weights
    skyrl_finish_weight_update   /finish_weight_update

In vLLM this calls any method of a worker by its name. Here a name is looked up in a table and nothing else is called.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from typing import Any

import msgspec
from starlette.requests import Request
from starlette.responses import Response

from seer.serve.bodies import decode
from seer.serve.refusals import bad_request, json_response
from seer.serve.service import Service
from seer.serve.weight_endpoints import UpdateInfo, receive_tensors

MAX_NAME_CHARS = 100


class CollectiveCall(msgspec.Struct, kw_only=True, forbid_unknown_fields=True):
    """A method of SkyRL's workers, and what it is called with."""

    method: str
    args: list[Any] | None = None
    kwargs: msgspec.Raw = msgspec.Raw(b"{}")
    timeout: Any = None
    """Not looked at: a broadcast has the deadlines of its group."""


class StartArguments(msgspec.Struct, kw_only=True, forbid_unknown_fields=True):
    """Of skyrl_start_weight_update."""

    is_checkpoint_format: bool = True


class UpdateArguments(msgspec.Struct, kw_only=True, forbid_unknown_fields=True):
    """Of update_weights_nccl."""

    update_info: UpdateInfo


class NoArguments(msgspec.Struct, forbid_unknown_fields=True):
    """Of skyrl_finish_weight_update."""


async def collective_rpc(service: Service, request: Request) -> Response:
    """Call a method that SkyRL has."""
    asked = await service.read(request, CollectiveCall)
    method = _METHODS.get(asked.method)
    if method is None:
        why = _REFUSED.get(asked.method, f"the methods are {', '.join(_METHODS)}")
        raise bad_request(f"there is no method {asked.method[:MAX_NAME_CHARS]!r} of workers", hint=why, param="method")
    if asked.args:
        raise bad_request(f"{len(asked.args)} arguments without a name", hint="give them in kwargs", param="args")
    await method(service, bytes(asked.kwargs))
    return json_response({"results": [None]})  # of the one rank that receives for all instances


async def _start(service: Service, kwargs: bytes) -> None:
    if not decode(kwargs, StartArguments).is_checkpoint_format:
        why = "send tensors as a checkpoint has them"
        raise bad_request("is_checkpoint_format=false is not supported", hint=why, param="is_checkpoint_format")
    service.weights.start()


async def _update(service: Service, kwargs: bytes) -> None:
    await receive_tensors(service, decode(kwargs, UpdateArguments).update_info)


async def _finish(service: Service, kwargs: bytes) -> None:
    decode(kwargs, NoArguments)
    await service.weights.finish()


_METHODS: dict[str, Callable[[Service, bytes], Awaitable[None]]] = {
    "skyrl_start_weight_update": _start,
    "update_weights_nccl": _update,
    "skyrl_finish_weight_update": _finish,
}
_NO_SLEEP = "the memory of the instances stays theirs: set offload_kv_for_weight_sync=false"
_REFUSED = {
    "update_weights_ipc": "trainer and server share no GPU: set trainer.placement.colocate_all=false",
    "skyrl_sleep_for_weight_sync": _NO_SLEEP,
    "skyrl_wake_for_weight_sync": _NO_SLEEP,
}
"""Methods that SkyRL calls under settings that cannot work here, and what to set instead."""
