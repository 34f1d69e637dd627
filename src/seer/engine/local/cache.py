"""The memory that KV blocks live in, and the way their bytes go out to the pool and come back.

One tensor, [block][layer][key, value][...]: a block's bytes are contiguous, so exporting blocks is handing
out views of them (on a CPU) or one copy of all (on a GPU). Keys are [head_dim][block_size] and values
[block_size][head_dim] within a KV head. Behind the blocks lie scratch blocks, in which draft nodes keep
their KV until they are accepted.

Invariants
  1. Scratch blocks are never exported, and no block table names one.
  2. The layout is part of the namespace: blocks of another layout, model or weights version can not be read by mistake.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Sequence
from typing import Any

import numpy as np
import torch

from seer.engine.local import huge_pages
from seer.engine.local.model_config import ModelConfig
from seer.kvpool.base import Owners, Pool
from seer.kvpool.keys import KVLayout, Namespace


class KVCache:
    """KV memory of one instance."""

    def __init__(
        self,
        config: ModelConfig,
        *,
        num_blocks: int,
        num_scratch_tokens: int,
        block_size: int,
        dtype: torch.dtype,
        device: torch.device,
    ) -> None:
        self.config = config
        self.num_blocks = num_blocks
        self.block_size = block_size
        self.num_scratch_tokens = num_scratch_tokens
        # One block more than asked for: padding rows of fixed shapes write to its last slot.
        num_scratch_blocks = -(-num_scratch_tokens // block_size) + 1
        shape = (
            num_blocks + num_scratch_blocks,
            config.num_layers,
            2,
            config.num_kv_heads * config.head_dim * block_size,
        )
        self.is_host_memory = device.type == "cpu"
        """Whether the pool can read and write the blocks where they are."""
        # Zeros, not garbage: implementations that mask by weight 0 must not meet a NaN.
        if self.is_host_memory:
            memory = huge_pages.zeros(math.prod(shape) * dtype.itemsize)
            self.tensor = torch.frombuffer(memory, dtype=dtype).view(shape)
        else:
            self.tensor = torch.zeros(shape, dtype=dtype, device=device)

    @property
    def block_bytes(self) -> int:
        """Memory of one block."""
        return self.tensor[0].numel() * self.tensor.element_size()

    @property
    def first_scratch_slot(self) -> int:
        """Slots from here on belong to draft nodes."""
        return self.num_blocks * self.block_size

    @property
    def spare_slot(self) -> int:
        """A slot nobody reads, for rows that only fill up a shape."""
        return len(self.tensor) * self.block_size - 1

    def keys(self, layer: int) -> torch.Tensor:
        """Keys of a layer, [block, kv head, head_dim, offset]."""
        c = self.config
        return self.tensor[:, layer, 0].view(-1, c.num_kv_heads, c.head_dim, self.block_size)

    def values(self, layer: int) -> torch.Tensor:
        """Values of a layer, [block, kv head, offset, head_dim]."""
        c = self.config
        return self.tensor[:, layer, 1].view(-1, c.num_kv_heads, self.block_size, c.head_dim)

    def namespace(self, model: str, weights_version: int) -> Namespace:
        """What the pool must know, beside the tokens, to tell these blocks from others."""
        layout = KVLayout(
            num_layers=self.config.num_layers,
            num_kv_heads=self.config.num_kv_heads,
            head_dim=self.config.head_dim,
            dtype=str(self.tensor.dtype).removeprefix("torch."),
            block_size=self.block_size,
        )
        return Namespace(model=model, weights_version=weights_version, layout=layout, salt="local/keys-transposed")

    def export(self, pool: Pool, keys: Sequence[bytes], blocks: Sequence[int], owners: Owners) -> list[bool]:
        """Offer blocks to the pool; what it takes is pinned for their owners."""
        if self.is_host_memory:
            return pool.put_now(list(keys), self._views(blocks), owners)
        gathered = self._rows.index_select(0, self._index(blocks))
        return pool.put_now(list(keys), gathered.cpu().numpy(), owners)

    def fetch(self, pool: Pool, keys: Sequence[bytes], blocks: Sequence[int]) -> int:
        """Fill blocks from the pool; returns how many leading ones it had."""
        if self.is_host_memory:
            return _num_leading(pool.get_now(list(keys), self._views(blocks)))
        on_gpu = self.tensor.device.type == "cuda"
        host = torch.empty((len(blocks), self.block_bytes), dtype=torch.uint8, pin_memory=on_gpu)
        count = _num_leading(pool.get_now(list(keys), host.numpy()))
        self._rows.index_copy_(0, self._index(blocks[:count]), host[:count].to(self.tensor.device, non_blocking=True))
        return count

    @property
    def _rows(self) -> torch.Tensor:
        """All of it as [block, byte]."""
        return self.tensor.view(len(self.tensor), -1).view(torch.uint8)

    def _index(self, blocks: Sequence[int]) -> torch.Tensor:
        return torch.tensor(blocks, dtype=torch.int64, device=self.tensor.device)

    def _views(self, blocks: Sequence[int]) -> list[np.ndarray[Any, np.dtype[np.uint8]]]:
        rows = self._rows
        return [rows[block].numpy() for block in blocks]


def _num_leading(found: Sequence[bool]) -> int:
    return found.index(False) if False in found else len(found)


def block_bytes(config: ModelConfig, block_size: int, dtype: torch.dtype) -> int:
    """Memory one block takes."""
    return 2 * config.num_layers * config.num_kv_heads * config.head_dim * block_size * dtype.itemsize


def model_identity(config: ModelConfig, fingerprint: str) -> str:
    """A name that two instances share only when they run the same weights."""
    return hashlib.blake2b(f"{config}|{fingerprint}".encode(), digest_size=16).hexdigest()
