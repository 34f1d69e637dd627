# SPDX-License-Identifier: Apache-2.0
"""Two or more processes that broadcast tensors of their memory to each other, with torch's gloo.

Apart from `torch.distributed`'s own default group, so a trainer can have both.
"""

from __future__ import annotations

from datetime import timedelta
from typing import Any

import torch
from torch._C._distributed_c10d import BroadcastOptions, PrefixStore, ProcessGroupGloo, TCPStore

BROADCAST_DEADLINE = timedelta(seconds=600)


class GlooGroup:
    """One rank of a group; rank 0 is where the others meet."""

    device = "cpu"

    def __init__(self, host: str, port: int, *, rank: int, world_size: int, deadline: timedelta) -> None:
        self._rank = rank
        self._store = TCPStore(host, port, world_size, is_master=rank == 0, timeout=deadline)
        # torch's types leave out the methods that this class has from ProcessGroup.Backend.
        self._group: Any = ProcessGroupGloo(
            PrefixStore("seer", self._store), rank, world_size, timeout=BROADCAST_DEADLINE
        )

    def broadcast(self, tensor: torch.Tensor, src: int) -> None:
        """Send a tensor from rank `src` to the others, into theirs."""
        options = BroadcastOptions()
        options.rootRank, options.rootTensor = src, 0
        self._group.broadcast([tensor], options).wait()
