# SPDX-License-Identifier: Apache-2.0
"""The memory of KV blocks, and copies of blocks to the pool and back.

One tensor, [block][layer][key, value][...]. A block's bytes are contiguous, so an export passes views of the blocks (on
a CPU) or one gathered copy (on a GPU). Keys are [head_dim][block_size] and values [block_size][head_dim] within a KV
head. Scratch blocks follow the ordinary ones: draft nodes keep their KV there until they are accepted.

Invariants
  1. Scratch blocks are never exported, and no chunk's block table refers to one.
  2. Layout, model and weights version are part of the namespace, so blocks of another kind are never read by mistake.
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
        # One block more than asked for: padding tokens of fixed shapes write to its last slot.
        num_scratch_blocks = -(-num_scratch_tokens // block_size) + 1
        shape = (
            num_blocks + num_scratch_blocks,
            config.num_layers,
            2,
            config.num_kv_heads * config.head_dim * block_size,
        )
        self.is_host_memory = device.type == "cpu"
        """Whether the pool can read and write the blocks where they are."""
        # Zeros: implementations that mask by weight 0 must not read a NaN.
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
        """The first slot of the scratch blocks."""
        return self.num_blocks * self.block_size

    @property
    def spare_slot(self) -> int:
        """A slot that is never read. Padding tokens write their KV there."""
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
        """What identifies these blocks in the pool, besides their tokens."""
        layout = KVLayout(
            num_layers=self.config.num_layers,
            num_kv_heads=self.config.num_kv_heads,
            head_dim=self.config.head_dim,
            dtype=str(self.tensor.dtype).removeprefix("torch."),
            block_size=self.block_size,
        )
        return Namespace(model=model, weights_version=weights_version, layout=layout, salt="local/keys-transposed")

    def export(self, pool: Pool, keys: Sequence[bytes], blocks: Sequence[int], owners: Owners) -> list[bool]:
        """Offer blocks to the pool. It pins the ones that it takes for their owners."""
        if self.is_host_memory:
            return pool.put_now(list(keys), self._views(blocks), owners)
        gathered = self._rows.index_select(0, self._index(blocks))
        return pool.put_now(list(keys), gathered.cpu().numpy(), owners)

    def fetch(self, pool: Pool, keys: Sequence[bytes], blocks: Sequence[int]) -> int:
        """Fill blocks from the pool; return how many leading ones it had."""
        if self.is_host_memory:
            return _num_leading(pool.get_now(list(keys), self._views(blocks)))
        on_gpu = self.tensor.device.type == "cuda"
        host = torch.empty((len(blocks), self.block_bytes), dtype=torch.uint8, pin_memory=on_gpu)
        count = _num_leading(pool.get_now(list(keys), host.numpy()))
        self._rows.index_copy_(0, self._index(blocks[:count]), host[:count].to(self.tensor.device, non_blocking=True))
        return count

    def read(self, blocks: Sequence[int]) -> torch.Tensor:
        """A copy of blocks in host memory, [block, byte]."""
        gathered = self._rows.index_select(0, self._index(blocks))
        if self.is_host_memory:
            return gathered
        host = torch.empty(gathered.shape, dtype=torch.uint8, pin_memory=self.tensor.device.type == "cuda")
        return host.copy_(gathered)

    def write(self, blocks: Sequence[int], rows: torch.Tensor) -> None:
        """Fill blocks with such a copy."""
        self._rows.index_copy_(0, self._index(blocks), rows.to(self.tensor.device, non_blocking=True))

    @property
    def _rows(self) -> torch.Tensor:
        """The whole memory as [block, byte]."""
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
    """A name that is equal only for instances of the same model and weights."""
    return hashlib.blake2b(f"{config}|{fingerprint}".encode(), digest_size=16).hexdigest()
