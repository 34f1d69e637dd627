# SPDX-License-Identifier: Apache-2.0
"""Weights that stay on the GPU: other processes of the machine map the memory instead of copying it.

A file in shared memory holds a CUDA handle for each tensor. A process that opens it sees the tensors in place and
copies what it keeps, from GPU memory to GPU memory.

Invariants
  1. The sender owns the memory: it must neither free nor change it while instances may open it. Synchronous training
     waits while a rollout runs, so an instance that restarts during the rollout finds the same weights.
  2. A file of handles is data of a fixed form; nothing in it is executed. It is opened only in this user's folder
     (seer.machine.private_files), where processes of this user alone can write.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any

import msgspec

from seer.errors import InputError
from seer.machine import private_files
from seer.machine.json_files import UNREADABLE

SUFFIX = ".gpu-handles"
"""Names the format, so that a reader can tell handles from safetensors."""
_MAX_BYTES = 64 << 20  # a handle takes a few hundred bytes
Count = Annotated[int, msgspec.Meta(ge=0)]


class TensorHandle(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """One tensor in the GPU memory of another process; the fields are those that torch needs to map it."""

    shape: list[Count]
    stride: list[Count]
    offset: Count
    dtype: str
    """Name in torch, as in "bfloat16"."""
    device: Count
    memory: bytes | None
    """CUDA's handle of the allocation; None for a tensor without elements."""
    memory_bytes: Count
    memory_offset_bytes: Count
    counter: bytes | None
    """torch's count of the users of the memory, in shared memory."""
    counter_offset: Count
    event: bytes | None
    """CUDA's handle of the event after which the memory may be read."""
    must_wait: bool


_Handles = dict[str, TensorHandle]


def are_on_gpu(weights: Any) -> bool:
    """Whether these are tensors, all of them on a GPU."""
    return isinstance(weights, Mapping) and bool(weights) and all(tensor.is_cuda for tensor in weights.values())


def wait_for_gpus(weights: Mapping[str, Any]) -> None:
    """Wait until nothing that was begun writes to these tensors any more; those on a CPU are not waited for."""
    for device in {tensor.device for tensor in weights.values() if tensor.is_cuda}:
        import torch

        torch.cuda.synchronize(device)


def write_handles(weights: Mapping[str, Any], path: Path) -> None:
    """Write the handles of tensors to a file named `*.gpu-handles`."""
    import torch

    assert path.suffix == SUFFIX, f"{path} would not be recognised"
    torch.cuda.synchronize()  # kernels may still write to them
    handles = {name: _handle_of(tensor.detach()) for name, tensor in weights.items()}
    private_files.write(path, msgspec.msgpack.encode(handles))


def open_handles(path: Path) -> dict[str, Any]:
    """The tensors of another process, in place."""
    if not private_files.is_inside(path):
        raise InputError(
            f"{path} is not in the folder of this user in which handles of GPU memory are kept",
            hint="give tensors or a safetensors file; handles are written by Seer alone",
        )
    try:
        handles = msgspec.msgpack.decode(private_files.read(path, _MAX_BYTES), type=_Handles)
    except (OSError, *UNREADABLE) as error:
        raise InputError(f"{path} cannot be read as handles of GPU memory: {error}") from None
    return {name: _tensor_of(handle, path) for name, handle in handles.items()}


def _handle_of(tensor: Any) -> TensorHandle:
    from torch.multiprocessing import reductions

    rebuild, arguments = reductions.reduce_tensor(tensor)  # type: ignore[no-untyped-call]
    assert rebuild is reductions.rebuild_cuda_tensor, f"a tensor on {tensor.device} has no handle"
    _, shape, stride, offset, _, dtype, device, memory, memory_bytes, memory_offset_bytes, _, *rest = arguments
    counter, counter_offset, event, must_wait = rest
    return TensorHandle(
        shape=list(shape),
        stride=list(stride),
        offset=offset,
        dtype=str(dtype).removeprefix("torch."),
        device=device,
        memory=memory,
        memory_bytes=memory_bytes,
        memory_offset_bytes=memory_offset_bytes,
        counter=counter,
        counter_offset=counter_offset,
        event=event,
        must_wait=must_wait,
    )


def _tensor_of(handle: TensorHandle, path: Path) -> Any:
    import torch
    from torch.multiprocessing import reductions

    dtype = getattr(torch, handle.dtype, None)
    if not isinstance(dtype, torch.dtype):
        raise InputError(f"{path} names a type of values that torch does not have: {handle.dtype!r}")
    return reductions.rebuild_cuda_tensor(  # type: ignore[no-untyped-call]
        torch.Tensor,
        torch.Size(handle.shape),
        tuple(handle.stride),
        handle.offset,
        torch.storage.TypedStorage,
        dtype,
        # A process that sees one GPU calls it 0, whatever the sender calls it.
        handle.device if torch.cuda.device_count() > 1 else 0,
        handle.memory,
        handle.memory_bytes,
        handle.memory_offset_bytes,
        False,  # requires_grad
        handle.counter,
        handle.counter_offset,
        handle.event,
        handle.must_wait,
    )
