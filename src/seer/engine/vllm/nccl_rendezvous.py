# SPDX-License-Identifier: Apache-2.0
"""Where the ranks of an NCCL group meet, without unpickling what the other rank sends.

vLLM's `StatelessProcessGroup` carries pickled objects, and the rank that listens chooses their bytes: to unpickle them
is to run its code. The one object that a communicator needs is NCCL's id of 128 bytes. It is read from the pickle as
data: the stream is split into its steps, none of which is taken.
"""

from __future__ import annotations

import dataclasses
import pickletools
from typing import Any

from vllm.distributed.device_communicators.pynccl_wrapper import ncclUniqueId
from vllm.distributed.utils import StatelessProcessGroup

from seer.errors import InputError

ID_BYTES = 128
MAX_PICKLE_BYTES = 4096
"""That of an id has about 230 bytes."""


class PlainGroup(StatelessProcessGroup):
    """One rank's end; it takes ids of NCCL from the others and nothing else."""

    @classmethod
    def meet(cls, host: str, port: int, *, rank: int, world_size: int) -> PlainGroup:
        """Meet the other ranks; rank 0 listens."""
        made = StatelessProcessGroup.create(host=host, port=port, rank=rank, world_size=world_size)
        return cls(**{one.name: getattr(made, one.name) for one in dataclasses.fields(made) if one.init})

    def broadcast_obj(self, obj: Any, src: int) -> Any:
        """Send an object, or receive NCCL's id."""
        if self.rank == src:
            return super().broadcast_obj(obj, src)
        key = f"broadcast_from/{src}/{self.broadcast_recv_src_counter[src]}"
        self.broadcast_recv_src_counter[src] += 1
        made = ncclUniqueId()
        made.internal[:] = unique_id(self.store.get(key))
        return made

    def recv_obj(self, src: int) -> Any:
        """Never: the bytes are another rank's."""
        raise _refused("an object")

    def broadcast(self, tensor: Any, src: int) -> Any:
        """Send a tensor; none is received this way."""
        if self.rank != src:
            raise _refused("a tensor")
        return super().broadcast(tensor, src)

    def recv(self, tensor: Any, src: int) -> Any:
        """Never: the bytes are another rank's."""
        raise _refused("a tensor")


def unique_id(pickled: bytes) -> bytes:
    """The one value of 128 bytes in a pickle."""
    if len(pickled) > MAX_PICKLE_BYTES:
        raise InputError(f"the other rank sent {len(pickled):,} bytes, an id of NCCL has {MAX_PICKLE_BYTES:,} at most")
    try:
        found = [value for _, value, _ in pickletools.genops(pickled) if isinstance(value, bytes)]
    except Exception as error:  # whatever bytes can do to a reader that has no list of its errors
        raise InputError(f"the other rank sent no pickle: {error}"[:200]) from None
    if len(found) != 1 or len(found[0]) != ID_BYTES:
        raise InputError(
            "the other rank sent something else than an id of NCCL", hint="the trainer must meet as vLLM's workers do"
        )
    return found[0]


def _refused(what: str) -> InputError:
    return InputError(f"{what} of another rank would be unpickled", hint="broadcast tensors over NCCL")
