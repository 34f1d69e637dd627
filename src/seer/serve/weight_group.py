# SPDX-License-Identifier: Apache-2.0
"""The server's end of a trainer's weight broadcast: it is one rank, receives every tensor, and the fleet hands them on.

With vLLM's endpoints the trainer is rank 0 and packs tensors as vLLM's packed broadcast does: tensors are joined as
bytes until they exceed the size of a buffer, and each buffer is a broadcast. With those of `trl vllm-serve` the server
is rank 0, where the trainer meets it, and each tensor is a broadcast. Over `nccl` the tensors arrive on the server's
GPU; over `gloo` in its memory, for machines without one. Calls that wait for the trainer run in threads, one at a time.

Invariants
  1. Both sides cut buffers by the same rule: the tensor that makes a buffer exceed its size is its last.
  2. A server that ends does not wait for a trainer that does not come: the threads are daemons.
"""

from __future__ import annotations

import asyncio
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from datetime import timedelta
from typing import Annotated, Any, Literal, Protocol

import msgspec
from msgspec import Meta

from seer.machine.daemon_thread import in_daemon_thread
from seer.ranges import NumBytes
from seer.serve.refusals import Refusal, bad_request

BUFFER_BYTES = 1 << 30
"""vLLM's default, which TRL uses."""
DTYPES = ("float64", "float32", "float16", "bfloat16", "int64", "int32", "int16", "int8", "uint8", "bool")
JOIN_DEADLINE = timedelta(seconds=120)


class InitInfo(msgspec.Struct, kw_only=True):
    """Where the trainer's group is."""

    master_address: str
    master_port: Annotated[int, Meta(ge=1, le=65_535)]
    rank_offset: Annotated[int, Meta(ge=1, le=1)]
    """The trainer is rank 0, and the server alone follows it."""
    world_size: Annotated[int, Meta(ge=2, le=2)]
    packed: Literal[True] = True
    packed_buffer_size_bytes: NumBytes = BUFFER_BYTES
    packed_num_buffers: Annotated[int, Meta(ge=1, le=64)] = 2
    backend: Literal["nccl", "gloo"] | None = None
    """The trainer's; looked at only to refuse another one than the server's, which alone knows what it has."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Meeting:
    """Where the server and the trainer meet. Rank 0 listens there; the other rank is the trainer's."""

    host: str
    port: int
    rank: int
    """The server's."""


@dataclass(frozen=True, slots=True)
class TensorInfo:
    """A tensor that is about to come."""

    name: str
    dtype: str
    shape: tuple[int, ...]

    def num_bytes(self) -> int:
        """Its size."""
        import torch

        if self.dtype not in DTYPES:
            raise bad_request(f"dtype {self.dtype[:40]!r} of {self.name[:100]}", hint=f"one of {', '.join(DTYPES)}")
        return math.prod(self.shape) * int(getattr(torch, self.dtype).itemsize)


class Communicator(Protocol):
    """What receives a broadcast."""

    device: str

    def broadcast(self, tensor: Any, src: int) -> Any:
        """Fill a tensor with the one of rank `src`."""

    def barrier(self) -> None:
        """Wait for the other rank."""


class WeightGroup:
    """The group with a trainer; there is at most one."""

    def __init__(self, *, backend: Literal["nccl", "gloo"], max_bytes: int, has_admin_key: bool = False) -> None:
        self.backend = backend
        self._has_admin_key = has_admin_key
        self._max_bytes = max_bytes
        self._communicator: Communicator | None = None
        self._trainer = 0  # its rank
        self._buffer_bytes = BUFFER_BYTES
        self._turn = asyncio.Lock()

    async def join(self, info: InitInfo) -> None:
        """Meet the trainer at its address; replaces an earlier group."""
        if info.backend not in (None, self.backend):
            raise bad_request(
                f"backend={info.backend!r}, and this server receives over {self.backend}", param="init_info.backend"
            )
        self._buffer_bytes = info.packed_buffer_size_bytes
        await self.meet(Meeting(host=info.master_address, port=info.master_port, rank=1))

    async def meet(self, meeting: Meeting) -> None:
        """Meet the trainer; replaces an earlier group."""
        self.refuse_without_key()
        self._communicator = None
        make = _join_gloo if self.backend == "gloo" else _join_nccl
        self._communicator = await self._in_thread(make, meeting)
        self._trainer = 1 - meeting.rank

    async def leave(self) -> None:
        """Forget the trainer."""
        self._communicator = None

    async def receive(self, tensors: Sequence[TensorInfo]) -> dict[str, Any]:
        """Tensors by name, as the trainer broadcasts them."""
        communicator = self._require()
        self.refuse_too_large(tensors)
        received: dict[str, Any] = await self._in_thread(receive_packed, communicator, tensors, self._buffer_bytes)
        return received

    async def receive_one(self, tensor: TensorInfo) -> Any:
        """A tensor that is broadcast as it is, with a barrier after it."""
        return await self._in_thread(receive_plain, self._require(), tensor, self._trainer)

    def refuse_too_large(self, tensors: Sequence[TensorInfo]) -> None:
        """Refuse tensors that do not fit here."""
        num_bytes = sum(tensor.num_bytes() for tensor in tensors)
        if num_bytes > self._max_bytes:
            raise bad_request(f"the tensors have {num_bytes:,} bytes", hint=f"at most {self._max_bytes:,} fit here")

    def refuse_without_key(self) -> None:
        """NCCL connects to the address that a request names, and trusts who answers: only an administrator may ask."""
        if self.backend == "nccl" and not self._has_admin_key:
            raise Refusal(
                403,
                "weights over NCCL need an administrative key",
                hint="start the server with --admin-key-file FILE; TRL takes http://seer:KEY@HOST:PORT as its URL",
            )

    def refuse_same_device(self, uuid: str | None) -> None:
        """Refuse a trainer on the GPU of this process: NCCL would hang."""
        if uuid is None or self.backend != "nccl":
            return
        from seer.engine.vllm.nccl_group import device_uuid

        if uuid == device_uuid():
            raise bad_request("the trainer is on the server's GPU", hint="give them different CUDA_VISIBLE_DEVICES")

    def _require(self) -> Communicator:
        if self._communicator is None:
            raise bad_request("there is no group with a trainer", hint="POST /init_weight_transfer_engine first")
        return self._communicator

    async def _in_thread(self, work: Any, *arguments: Any) -> Any:
        async with self._turn:
            return await in_daemon_thread("seer-weights", work, *arguments)


def receive_packed(communicator: Communicator, tensors: Sequence[TensorInfo], buffer_bytes: int) -> dict[str, Any]:
    """Receive buffer after buffer and cut them into tensors."""
    import torch

    received = {}
    for batch in buffers(tensors, buffer_bytes):
        sizes = [tensor.num_bytes() for tensor in batch]
        packed = torch.empty(sum(sizes), dtype=torch.uint8, device=communicator.device)
        communicator.broadcast(packed, src=0)
        for tensor, part in zip(batch, torch.split(packed, sizes), strict=True):
            # Cloned: a view may start where its type may not, and would keep the whole buffer.
            received[tensor.name] = part.clone().view(getattr(torch, tensor.dtype)).view(tensor.shape)
    return received


def buffers(tensors: Sequence[TensorInfo], buffer_bytes: int) -> Iterator[list[TensorInfo]]:
    """The tensors of each buffer (invariant 1)."""
    batch: list[TensorInfo] = []
    num_bytes = 0
    for tensor in tensors:
        batch.append(tensor)
        num_bytes += tensor.num_bytes()
        if num_bytes > buffer_bytes:
            yield batch
            batch, num_bytes = [], 0
    if batch:
        yield batch


def receive_plain(communicator: Communicator, tensor: TensorInfo, trainer: int) -> Any:
    """Receive one tensor of the trainer's rank."""
    import torch

    received = torch.empty(tensor.shape, dtype=getattr(torch, tensor.dtype), device=communicator.device)
    communicator.broadcast(received, src=trainer)
    communicator.barrier()
    return received


def _join_gloo(at: Meeting) -> Communicator:
    from seer.engine.gloo_group import GlooGroup

    return GlooGroup(at.host, at.port, rank=at.rank, world_size=2, deadline=JOIN_DEADLINE)


def _join_nccl(at: Meeting) -> Communicator:
    from seer.engine.vllm.nccl_group import NcclGroup

    return NcclGroup(at.host, at.port, rank=at.rank, world_size=2)
