# SPDX-License-Identifier: Apache-2.0
"""The arithmetic of a decoder layer on a GPU: cuBLAS products and the Triton kernels of gpu_kernels.py.

`step` holds the arrays that the kernels read. `begin` makes it for a batch of any form (pieces of contexts beside
decoding tokens). Captured graphs (gpu_runner.py) have their own, whose tensors keep their addresses while their content
changes.
"""

from __future__ import annotations

import importlib
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from seer.engine.local import gpu_kernels as kernels
from seer.engine.local.batch import Batch
from seer.engine.local.cache import KVCache
from seer.engine.local.ops import Linear, PlainLinear
from seer.engine.local.rotary import RotaryTable
from seer.engine.local.uniform_rows import NODES, POSITION, SEQ_SLOT, SLOT, TOKEN, VISIBLE, form_of
from seer.errors import ConfigError

triton: Any = importlib.import_module("triton")  # only GPU builds of PyTorch depend on it

TILE_TOKENS = 16
"""Context tokens that one attention program handles: enough rows for `tl.dot`, which needs 16."""
BLOCK_N = 64
"""Positions of the context that an attention program reads at a time."""
VERIFY_BLOCK_M = 64
"""Least rows times heads of an attention program over a tree, so that trees of all sizes share one compiled kernel."""
PROGRAMS = 264
"""Programs that fill an H200 twice (132 multiprocessors). Contexts are split until there are about as many."""
MAX_SPLITS = 32
"""Parts of a context at most: one program joins them all."""
ANY_TREE_NODES = 32
"""Draft nodes that an attention program of any batch looks at: the largest tree's, rounded up to a power of two."""
MAX_SAMPLE_PARTS = 16
"""Parts of the vocabulary at most: one program joins them all."""
SAMPLE_BLOCK = 2048
"""Logits that a sampling program reads at a time."""


@dataclass(slots=True)
class GpuStep:
    """One forward pass as the kernels see it; fields as in gpu_kernels.py."""

    rows: torch.Tensor
    tiles: torch.Tensor
    tables: torch.Tensor
    num_batched_tokens: int
    tile_tokens: int
    num_node_tokens: int
    """0 without trees; else a power of two, at least 16 and at least the nodes of the largest tree."""

    @property
    def capacity(self) -> int:
        """Batched tokens that `rows` has room for."""
        return self.rows.shape[1]

    @property
    def num_tiles(self) -> int:
        """Attention tiles, padding included."""
        return self.tiles.shape[1]


class WideLinear:
    """A matrix whose products are returned in fp32. Logits rounded to bf16 would have many ties."""

    def __init__(self, weight: torch.Tensor) -> None:
        self.transposed = weight.t()

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        """x [rows, in] -> [rows, out] in fp32."""
        return torch.mm(x, self.transposed, out_dtype=torch.float32)

    def replace(self, other: Linear) -> None:
        """Copy another matrix's values into this one: captured graphs read this address."""
        assert isinstance(other, WideLinear), f"{type(other).__name__} replaces a WideLinear"
        self.transposed.copy_(other.transposed)

    @staticmethod
    def supported(weight: torch.Tensor) -> bool:
        """Whether this PyTorch has bf16 products with fp32 results."""
        try:
            WideLinear(weight[:16])(weight[:16])
        except (TypeError, RuntimeError, NotImplementedError):
            return False
        return True


class GpuOps:
    """Triton kernels around cuBLAS."""

    def __init__(self, cache: KVCache, rotary: RotaryTable) -> None:
        head_dim = cache.config.head_dim
        if head_dim < 16 or head_dim & (head_dim - 1):
            raise ConfigError(f"head_dim={head_dim}; the GPU kernels need a power of two of at least 16")
        self.cache, self.config, self.rotary = cache, cache.config, rotary
        self.device = cache.tensor.device
        self.block_stride = cache.tensor.stride(0)
        self.layer_stride = cache.tensor.stride(1)
        self.step: GpuStep | None = None

    def linear(self, weight: torch.Tensor, bias: torch.Tensor | None, *, wide: bool = False) -> Linear:
        """Matrices keep their layout; the output matrix returns fp32."""
        if wide and bias is None and weight.dtype != torch.float32 and WideLinear.supported(weight):
            return WideLinear(weight)
        return PlainLinear(weight, bias)

    def begin(self, batch: Batch, tables: torch.Tensor) -> None:
        """Lay any batch out for the kernels; `tables` is on the device."""
        rows, tiles = describe(batch)
        self.step = GpuStep(
            rows=torch.from_numpy(rows).to(self.device),
            tiles=torch.from_numpy(tiles).to(self.device),
            tables=tables,
            num_batched_tokens=batch.num_batched_tokens,
            tile_tokens=TILE_TOKENS,
            num_node_tokens=ANY_TREE_NODES if any(work.tree for work in batch.works) else 0,
        )

    def add_rms_norm(
        self, x: torch.Tensor | None, hidden: torch.Tensor, weight: torch.Tensor, eps: float
    ) -> torch.Tensor:
        """Add and normalise in one pass."""
        out = torch.empty_like(hidden)
        rows, dim = hidden.shape
        block = triton.next_power_of_2(dim)
        kernels.add_rms_norm_kernel[(rows,)](
            hidden if x is None else x, hidden, weight, out, dim, eps, HAS_X=x is not None, BLOCK=block,
            num_warps=4 if block <= 2048 else 8,
        )  # fmt: skip
        return out

    def rotate_store(
        self,
        layer: int,
        qkv: torch.Tensor,
        q_norm: torch.Tensor | None,
        k_norm: torch.Tensor | None,
        eps: float,
    ) -> None:
        """In place, then store in the cache."""
        c, step = self.config, self._step()
        kernels.rotate_store_kernel[(step.num_batched_tokens, c.num_heads + 2 * c.num_kv_heads)](
            qkv, qkv if q_norm is None else q_norm, qkv if k_norm is None else k_norm,
            self.rotary.cosine, self.rotary.sine, step.rows, step.capacity, self.cache.tensor,
            layer * self.layer_stride, self.block_stride, eps,
            NORM=q_norm is not None, H=c.num_heads, HKV=c.num_kv_heads, D=c.head_dim,
            BT=self.cache.block_size, num_warps=1,
        )  # fmt: skip

    def attend(self, layer: int, qkv: torch.Tensor) -> torch.Tensor:
        """Attention over the paged cache and, for draft nodes, over the tree's own rows."""
        c, step = self.config, self._step()
        out = torch.empty((len(qkv), c.num_heads * c.head_dim), dtype=qkv.dtype, device=qkv.device)
        splits = num_splits(step.num_tiles * c.num_kv_heads)
        places = step.num_batched_tokens * c.num_heads
        parts = stats = out
        if splits > 1:
            parts = torch.empty(places * splits * c.head_dim, dtype=torch.float32, device=qkv.device)
            stats = torch.empty(places * splits * 2, dtype=torch.float32, device=qkv.device)
        least = VERIFY_BLOCK_M if step.num_node_tokens else 16
        block_m = max(least, triton.next_power_of_2(step.tile_tokens * (c.num_heads // c.num_kv_heads)))
        kernels.attention_kernel[(step.num_tiles, c.num_kv_heads, splits)](
            qkv, self.cache.tensor, step.tables, step.rows, step.capacity, step.tiles, step.num_tiles, out,
            parts, stats, layer * self.layer_stride, self.block_stride, step.tables.shape[1],
            splits, c.head_dim**-0.5, H=c.num_heads, HKV=c.num_kv_heads, D=c.head_dim, BT=self.cache.block_size,
            BLOCK_M=block_m, BLOCK_N=BLOCK_N, SPLIT=splits > 1, NODE_ROWS=step.num_node_tokens, num_warps=4 if
            block_m <= 64 else 8, num_stages=2,
        )  # fmt: skip
        if splits > 1:
            kernels.join_parts_kernel[(places,)](
                parts, stats, out, splits, D=c.head_dim, MAX_SPLITS=MAX_SPLITS, num_warps=1
            )
        return out

    def silu_mul(self, gate_up: torch.Tensor) -> torch.Tensor:
        """silu(gate) * up."""
        rows, width = gate_up.shape
        out = torch.empty((rows, width // 2), dtype=gate_up.dtype, device=gate_up.device)
        block = 1024
        kernels.silu_mul_kernel[(rows, triton.cdiv(width // 2, block))](gate_up, out, width // 2, BLOCK=block)
        return out

    def move(self, source: list[int], target: list[int]) -> None:
        """All moves in one launch. Slots are disjoint, so their order does not matter."""
        moves = torch.tensor([source, target], dtype=torch.int32)
        if self.device.type == "cuda":
            moves = moves.pin_memory().to(self.device, non_blocking=True)
        self.move_on_device(moves, num_programs=len(source))

    def move_on_device(self, moves: torch.Tensor, *, num_programs: int) -> None:
        """As `move`, for sources and targets on the device, [2][capacity]. A source of -1 is skipped."""
        c = self.config
        kernels.move_kernel[(num_programs, c.num_layers, c.num_kv_heads)](
            self.cache.tensor, moves, moves.shape[1], self.block_stride,
            HKV=c.num_kv_heads, D=c.head_dim, BT=self.cache.block_size, num_warps=1,
        )  # fmt: skip

    def sample(
        self,
        logits: torch.Tensor,
        sample_rows: torch.Tensor,
        seq_slots: SeqSlotState,
        *,
        advance: bool,
    ) -> torch.Tensor:
        """Sample a token per row of logits: [rows, 4] of token (its bits), logprob, raw logprob, margin."""
        step = self._step()
        count, vocab = logits.shape
        num_parts = min(MAX_SAMPLE_PARTS, triton.next_power_of_2(triton.cdiv(vocab, SAMPLE_BLOCK)))
        parts = torch.empty((count, num_parts, 8), dtype=torch.float32, device=logits.device)
        sampled = torch.empty((count, 4), dtype=torch.float32, device=logits.device)
        size = triton.cdiv(triton.cdiv(vocab, num_parts), SAMPLE_BLOCK) * SAMPLE_BLOCK
        kernels.sample_part_kernel[(count, num_parts)](
            logits, sample_rows, step.rows, step.capacity, seq_slots.seeds, seq_slots.inverse_temperature, parts, vocab,
            size, PARTS=num_parts, BLOCK=SAMPLE_BLOCK, num_warps=4,
        )  # fmt: skip
        kernels.sample_join_kernel[(count,)](
            parts, sample_rows, step.rows, step.capacity, seq_slots.inverse_temperature, sampled, seq_slots.tokens,
            seq_slots.positions, PARTS=num_parts, ADVANCE=advance, num_warps=1,
        )  # fmt: skip
        return sampled

    def _step(self) -> GpuStep:
        assert self.step is not None, "called before begin"
        return self.step


@dataclass(slots=True)
class SeqSlotState:
    """State of each sequence slot on the device, so that decoding steps need no input from the host."""

    tokens: torch.Tensor
    """int32: the sequence's last token."""
    positions: torch.Tensor
    """int32: that token's position."""
    limits: torch.Tensor
    """int32: the last position with a reserved KV slot."""
    seeds: torch.Tensor
    """int64: the mixed seed of its sampling noise."""
    inverse_temperature: torch.Tensor
    """fp32; 0 is greedy."""

    @classmethod
    def zeros(cls, num_seq_slots: int, device: torch.device) -> SeqSlotState:
        """State of idle sequence slots."""

        def zeros(dtype: torch.dtype) -> torch.Tensor:
            return torch.zeros(num_seq_slots, dtype=dtype, device=device)

        return cls(
            tokens=zeros(torch.int32),
            positions=zeros(torch.int32),
            limits=zeros(torch.int32),
            seeds=zeros(torch.int64),
            inverse_temperature=zeros(torch.float32),
        )


def describe(batch: Batch) -> tuple[NDArray[np.int32], NDArray[np.int32]]:
    """The rows and tiles of any batch, as gpu_kernels.py defines them."""
    rows = np.zeros((6, batch.num_batched_tokens), np.int32)
    rows[TOKEN], rows[POSITION] = batch.tokens, batch.positions
    rows[SLOT], rows[VISIBLE] = batch.slots, batch.num_visible
    tiles: list[tuple[int, int, int]] = []
    for index, work in enumerate(batch.works):
        first, last = int(batch.segment_rows[index]), int(batch.segment_rows[index + 1])
        rows[SEQ_SLOT, first:last] = work.active.seq_slot
        parents = work.tree.parents if work.tree else ()
        assert len(parents) <= kernels.MAX_NODES, f"a tree of {len(parents)} nodes, {kernels.MAX_NODES} are possible"
        node_first = last - len(parents)
        rows[NODES, node_first:last] = form_of(tuple(parents)).masks
        tiles += [(at, min(TILE_TOKENS, last - at), node_first) for at in range(first, last, TILE_TOKENS)]
    return rows, np.ascontiguousarray(np.array(tiles, np.int32).T)


def num_splits(num_programs: int) -> int:
    """Parts a context is split into: a power of two that about fills the GPU."""
    wanted = PROGRAMS // num_programs
    return max(1, min(MAX_SPLITS, 1 << wanted.bit_length() >> 1))
