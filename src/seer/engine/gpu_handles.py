"""Weights that stay on the GPU: other processes of the machine map the memory instead of copying it.

A file in shared memory holds a CUDA handle for each tensor. A process that opens it sees the tensors in place and
copies what it keeps, from GPU memory to GPU memory.

Invariants
  1. The sender owns the memory: it must neither free nor change it while instances may open it. Synchronous training
     waits while a rollout runs, so an instance that restarts during the rollout finds the same weights.
"""

from __future__ import annotations

import pickle
from collections.abc import Mapping
from pathlib import Path
from typing import Any

SUFFIX = ".gpu-handles"
"""Names the format, so that a reader can tell handles from safetensors."""


def are_on_gpu(weights: Any) -> bool:
    """Whether these are tensors, all of them on a GPU."""
    return isinstance(weights, Mapping) and bool(weights) and all(tensor.is_cuda for tensor in weights.values())


def write_handles(weights: Mapping[str, Any], path: Path) -> None:
    """Write the handles of tensors to a file named `*.gpu-handles`."""
    import torch
    from torch.multiprocessing.reductions import reduce_tensor

    assert path.suffix == SUFFIX, f"{path} would not be recognised"
    torch.cuda.synchronize()  # kernels may still write to them
    handles = {name: reduce_tensor(tensor.detach()) for name, tensor in weights.items()}  # type: ignore[no-untyped-call]
    path.write_bytes(pickle.dumps(handles))


def open_handles(path: Path) -> dict[str, Any]:
    """The tensors of another process, in place. The file is unpickled, so it must be one that Seer wrote."""
    handles: dict[str, tuple[Any, tuple[Any, ...]]] = pickle.loads(path.read_bytes())
    return {name: rebuild(*arguments) for name, (rebuild, arguments) in handles.items()}
