# SPDX-License-Identifier: Apache-2.0
"""Two or more processes that broadcast tensors of their memory to each other, with torch's gloo.

Apart from `torch.distributed`'s own default group, so a trainer can have both.

Invariant: rank 0 listens on the address that it was given, and on no other of its machine.
"""

from __future__ import annotations

import socket
from datetime import timedelta
from typing import Any

import torch
from torch._C._distributed_c10d import BroadcastOptions, PrefixStore, ProcessGroupGloo, TCPStore

BROADCAST_DEADLINE = timedelta(seconds=600)


class GlooGroup:
    """One rank of a group; rank 0 is where the others meet."""

    device = "cpu"

    def __init__(self, host: str, port: int, *, rank: int, world_size: int, deadline: timedelta) -> None:
        is_first = rank == 0
        listener = socket.create_server((host, port)).detach() if is_first else None
        self._store = TCPStore(
            host, port, world_size, is_master=is_first, timeout=deadline, master_listen_fd=listener, use_libuv=False
        )
        # torch's types leave out the methods that this class has from ProcessGroup.Backend.
        self._group: Any = ProcessGroupGloo(
            PrefixStore("seer", self._store), rank, world_size, timeout=BROADCAST_DEADLINE
        )

    def broadcast(self, tensor: torch.Tensor, src: int) -> None:
        """Send a tensor from rank `src` to the others, into theirs."""
        options = BroadcastOptions()
        options.rootRank, options.rootTensor = src, 0
        self._group.broadcast([tensor], options).wait()

    def barrier(self) -> None:
        """Nothing to wait for: a broadcast is over when every rank has the tensor."""
