# SPDX-License-Identifier: Apache-2.0
"""The GPUs that this process sees, and their free memory."""

from __future__ import annotations


def num_visible_gpus() -> int:
    """How many there are, CUDA_VISIBLE_DEVICES honoured; 0 without torch."""
    try:
        import torch
    except ImportError:
        return 0
    return torch.cuda.device_count()


def free_gpu_bytes(gpu: int) -> int | None:
    """What is free on a GPU now; None without torch or without such a GPU."""
    if gpu >= num_visible_gpus():
        return None
    import torch

    return int(torch.cuda.mem_get_info(gpu)[0])
