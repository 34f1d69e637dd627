# SPDX-License-Identifier: Apache-2.0
"""Free memory of a GPU, for the memory plan."""

from __future__ import annotations


def free_gpu_bytes(device: str) -> int | None:
    """What is free on the device now; None without torch or without such a GPU."""
    try:
        import torch
    except ImportError:
        return None
    index = int(device.partition(":")[2] or 0)
    if not torch.cuda.is_available() or index >= torch.cuda.device_count():
        return None
    return int(torch.cuda.mem_get_info(index)[0])
