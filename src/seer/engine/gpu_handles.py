"""Weights that stay on the GPU: other processes of the machine are handed the memory itself, not a copy.

A file in shared memory holds, for each tensor, what CUDA needs to map its memory into another process. Whoever opens it
sees the tensors where they are and copies what it wants to keep, from GPU memory to GPU memory.

Invariants
  1. The memory is the sender's: it must not be freed, and means these weights only until the sender changes them. A
     trainer waits while a rollout runs, so an instance that is restarted meanwhile still finds the right ones.
"""

from __future__ import annotations

import pickle
from collections.abc import Mapping
from pathlib import Path
from typing import Any

SUFFIX = ".gpu-handles"


def are_on_gpu(weights: Any) -> bool:
    """Whether these are tensors, all of them in a GPU's memory."""
    return isinstance(weights, Mapping) and bool(weights) and all(tensor.is_cuda for tensor in weights.values())


def write_handles(weights: Mapping[str, Any], path: Path) -> None:
    """Write the handles of tensors to a file named `*.gpu-handles`."""
    import torch
    from torch.multiprocessing.reductions import reduce_tensor

    assert path.suffix == SUFFIX, f"{path} would not be recognised"
    torch.cuda.synchronize()  # whatever still writes to them
    handles = {name: reduce_tensor(tensor.detach()) for name, tensor in weights.items()}  # type: ignore[no-untyped-call]
    path.write_bytes(pickle.dumps(handles))


def open_handles(path: Path) -> dict[str, Any]:
    """The tensors of another process, in place. The file must be of our own making: it is unpickled."""
    handles: dict[str, tuple[Any, tuple[Any, ...]]] = pickle.loads(path.read_bytes())
    return {name: rebuild(*arguments) for name, (rebuild, arguments) in handles.items()}
