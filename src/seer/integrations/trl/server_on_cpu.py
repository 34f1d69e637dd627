# SPDX-License-Identifier: Apache-2.0
"""TRL's server mode on a machine without CUDA: `with weights_over_gloo(): GRPOTrainer(...).train()`.

TRL's client broadcasts weights with NCCL and refuses any other device. Here its two methods that touch NCCL do the same
over gloo: the trainer, its configuration and every HTTP call stay TRL's own. On a GPU none of this is needed.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future
from datetime import timedelta
from threading import Thread
from typing import Any, TypeVar

import torch
from trl.generation.vllm_client import VLLMClient

from seer.engine.gloo_group import GlooGroup

BUFFER_BYTES = 1 << 30
"""As vLLM's packed broadcast, which the server expects."""
JOIN_DEADLINE = timedelta(seconds=120)
Metadata = Sequence[tuple[str, str, list[int]]]
T = TypeVar("T")


@contextlib.contextmanager
def weights_over_gloo() -> Iterator[None]:
    """Let TRL's clients made from now on broadcast weights from the CPU."""
    kind: Any = VLLMClient
    before = kind.init_communicator, kind.update_named_params
    kind.init_communicator, kind.update_named_params = _join, _update
    try:
        yield
    finally:
        kind.init_communicator, kind.update_named_params = before


def _join(client: Any, device: object = "cpu") -> None:
    """`VLLMClient.init_communicator`: the trainer is rank 0, and the server the only other one."""
    world_size = client.get_world_size() + 1
    meeting = {"master_address": "127.0.0.1", "master_port": client.group_port}
    info = {**meeting, "rank_offset": 1, "world_size": world_size, "packed": True, "backend": "gloo"}
    group = _beside(GlooGroup, "127.0.0.1", client.group_port, rank=0, world_size=world_size, deadline=JOIN_DEADLINE)
    client._post(f"{client.base_url}/init_weight_transfer_engine", json={"init_info": info})
    client.communicator = group.result()


def _update(client: Any, metadata: Metadata, named_params: Iterator[tuple[str, torch.Tensor]]) -> None:
    """`VLLMClient.update_named_params`: announce the tensors, and broadcast them in that order."""
    names, dtypes, shapes = (list(column) for column in zip(*metadata, strict=True))
    info = {"names": names, "dtype_names": dtypes, "shapes": shapes}
    if not client._updating_weights:
        client._start_weight_update()
    sent = _beside(_broadcast, client.communicator, named_params)
    client._post(f"{client.base_url}/update_weights", json={"update_info": info})
    sent.result()
    if not client._updating_weights:
        client._finish_weight_update()


def _beside(work: Callable[..., T], *arguments: Any, **named: Any) -> Future[T]:
    """Do the trainer's half of something in a thread. The server's is a request, which waits for this half and is
    answered at once if it is refused; this half may then never end, so its thread is a daemon.
    """
    done: Future[T] = Future()

    def run() -> None:
        try:
            done.set_result(work(*arguments, **named))
        except BaseException as error:
            done.set_exception(error)

    Thread(target=run, name="seer-trainer-weights", daemon=True).start()
    return done


def _broadcast(group: GlooGroup, named_params: Iterator[tuple[str, torch.Tensor]]) -> None:
    for packed in pack((tensor for _, tensor in named_params), BUFFER_BYTES):
        group.broadcast(packed, src=0)


def pack(tensors: Iterator[torch.Tensor], buffer_bytes: int) -> Iterator[torch.Tensor]:
    """Tensors as bytes, joined until they exceed the size of a buffer."""
    batch: list[torch.Tensor] = []
    num_bytes = 0
    for tensor in tensors:
        batch.append(tensor.detach().contiguous().view(-1).view(torch.uint8))
        num_bytes += batch[-1].numel()
        if num_bytes > buffer_bytes:
            yield torch.cat(batch)
            batch, num_bytes = [], 0
    if batch:
        yield torch.cat(batch)
