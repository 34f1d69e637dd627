# SPDX-License-Identifier: Apache-2.0
"""A rank of a trainer's NCCL group, met as vLLM's own workers meet it, except that nothing is unpickled."""

from __future__ import annotations

import contextlib
import time
from typing import Any

from seer.engine.gloo_group import BROADCAST_DEADLINE
from seer.errors import DeadlineExceeded

LOOK_S = 0.001
"""Between two looks whether a tensor has arrived."""


def device_uuid() -> str:
    """Of the GPU that receives."""
    import torch

    return str(torch.cuda.get_device_properties(0).uuid)


def _nccl_environment() -> contextlib.AbstractContextManager[object]:
    try:
        from vllm.utils.nccl import unpinned_nccl_env
    except ImportError:  # vLLM before it pinned variables of NCCL
        return contextlib.nullcontext()
    made: contextlib.AbstractContextManager[object] = unpinned_nccl_env()
    return made


class NcclGroup:
    """One rank on this process's first GPU."""

    device = "cuda:0"

    def __init__(self, host: str, port: int, *, rank: int, world_size: int) -> None:
        import torch
        from vllm.distributed.device_communicators.pynccl import PyNcclCommunicator

        from seer.engine.vllm.nccl_rendezvous import PlainGroup

        torch.cuda.set_device(0)
        self._torch = torch
        self._unfinished: list[Any] = []  # NCCL may still write into them
        group = PlainGroup.meet(host, port, rank=rank, world_size=world_size)
        with _nccl_environment():
            self._communicator = PyNcclCommunicator(group, device=0)

    def broadcast(self, tensor: Any, src: int) -> None:
        """Receive a tensor of rank `src`; returns when it is here."""
        stream = self._torch.cuda.current_stream()
        self._communicator.broadcast(tensor, src=src, stream=stream)
        arrived: Any = self._torch.cuda.Event()  # type: ignore[no-untyped-call]
        arrived.record(stream)
        until_s = time.monotonic() + BROADCAST_DEADLINE.total_seconds()
        while not arrived.query():
            if time.monotonic() > until_s:
                self._unfinished.append(tensor)
                raise DeadlineExceeded("a broadcast of the trainer", BROADCAST_DEADLINE.total_seconds())
            time.sleep(LOOK_S)

    def barrier(self) -> None:
        """Wait for the other ranks, as TRL's client does after every tensor."""
        group: Any = self._communicator.group  # one of vLLM's own, here
        group.barrier()
