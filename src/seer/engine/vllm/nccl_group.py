# SPDX-License-Identifier: Apache-2.0
"""A rank of a trainer's NCCL group, met as vLLM's own workers meet it (0.28 and later)."""

from __future__ import annotations

from typing import Any


def device_uuid() -> str:
    """Of the GPU that receives."""
    import torch

    return str(torch.cuda.get_device_properties(0).uuid)


class NcclGroup:
    """One rank on this process's first GPU."""

    device = "cuda:0"

    def __init__(self, host: str, port: int, *, rank: int, world_size: int) -> None:
        import torch
        from vllm.distributed.weight_transfer.nccl_common import stateless_init_process_group

        torch.cuda.set_device(0)
        self._torch = torch
        self._communicator = stateless_init_process_group(host, port, rank, world_size, device=0)

    def broadcast(self, tensor: Any, src: int) -> None:
        """Receive a tensor of rank `src`; returns when it is here."""
        self._communicator.broadcast(tensor, src=src)
        self._torch.cuda.synchronize()

    def barrier(self) -> None:
        """Wait for the other ranks, as TRL's client does after every tensor."""
        group: Any = self._communicator.group  # one of vLLM's own, here
        group.barrier()
