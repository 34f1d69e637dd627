# SPDX-License-Identifier: Apache-2.0
"""The arithmetic of a decoder layer: the protocol, and its specification in plain PyTorch.

The specification runs on any device and in any dtype. The fast implementations (cpu_ops.py with native kernels,
gpu_ops.py with Triton) are tested against it. It also runs where they cannot.

An implementation gets each batch once (`begin`) and is then called layer by layer.
"""

from __future__ import annotations

from typing import Protocol

import torch

from seer.engine.local.batch import Batch
from seer.engine.local.cache import KVCache
from seer.engine.local.rotary import RotaryTable


class Linear(Protocol):
    """A matrix, in the form that its device multiplies fastest."""

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        """x [rows, in] -> [rows, out]."""

    def replace(self, other: Linear) -> None:
        """Take the values of another matrix of the same form. Every holder of this object sees them."""


class MakeLinear(Protocol):
    """Prepares matrices for multiplying."""

    def __call__(self, weight: torch.Tensor, bias: torch.Tensor | None, *, wide: bool = False) -> Linear:
        """Prepare a matrix [out, in]; `wide` asks for results in fp32 where that is cheap."""


class Ops(Protocol):
    """Everything model.py needs that depends on the device."""

    def linear(self, weight: torch.Tensor, bias: torch.Tensor | None, *, wide: bool = False) -> Linear:
        """As `MakeLinear`."""

    def begin(self, batch: Batch, tables: torch.Tensor) -> None:
        """Prepare the layers of a batch; `tables` is [sequence slots, blocks]."""

    def add_rms_norm(
        self, x: torch.Tensor | None, hidden: torch.Tensor, weight: torch.Tensor, eps: float
    ) -> torch.Tensor:
        """Add `x` to `hidden` in place; return it normalised."""

    def rotate_store(
        self,
        layer: int,
        qkv: torch.Tensor,
        q_norm: torch.Tensor | None,
        k_norm: torch.Tensor | None,
        eps: float,
    ) -> None:
        """Normalise and rotate queries and keys in place; store keys and values in the cache."""

    def attend(self, layer: int, qkv: torch.Tensor) -> torch.Tensor:
        """Attention of every batched token."""

    def silu_mul(self, gate_up: torch.Tensor) -> torch.Tensor:
        """silu(gate) * up."""

    def move(self, source: list[int], target: list[int]) -> None:
        """Copy KV of all layers between slots, to move accepted draft nodes into their chunk's blocks."""


class PlainLinear:
    """A matrix as PyTorch has it."""

    def __init__(self, weight: torch.Tensor, bias: torch.Tensor | None) -> None:
        self.weight, self.bias = weight, bias

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        """x [rows, in] -> [rows, out]."""
        return torch.nn.functional.linear(x, self.weight, self.bias)

    def replace(self, other: Linear) -> None:
        """Take another matrix's values."""
        assert isinstance(other, PlainLinear), f"{type(other).__name__} replaces a PlainLinear"
        self.weight = replaced(self.weight, other.weight)
        if self.bias is not None and other.bias is not None:
            self.bias = replaced(self.bias, other.bias)


class TorchOps:
    """The specification, in plain PyTorch. Attention is computed chunk by chunk."""

    def __init__(self, cache: KVCache, rotary: RotaryTable) -> None:
        self.cache = cache
        self.config = cache.config
        self.rotary = rotary

    def linear(self, weight: torch.Tensor, bias: torch.Tensor | None, *, wide: bool = False) -> Linear:
        """Matrices keep their layout."""
        return PlainLinear(weight, bias)

    def begin(self, batch: Batch, tables: torch.Tensor) -> None:
        """Keep the batch, its angles and its KV slots."""
        device = self.cache.tensor.device
        self.batch, self.tables = batch, tables.to(device)
        self.cosine, self.sine = self.rotary.rows(torch.from_numpy(batch.positions).to(device))
        slots = torch.from_numpy(batch.slots).to(device)
        self.blocks, self.offsets = slots // self.cache.block_size, slots % self.cache.block_size

    def add_rms_norm(
        self, x: torch.Tensor | None, hidden: torch.Tensor, weight: torch.Tensor, eps: float
    ) -> torch.Tensor:
        """Normalise in fp32, as the models were trained."""
        if x is not None:
            hidden += x
        return rms_norm(hidden, weight, eps)

    def rotate_store(
        self,
        layer: int,
        qkv: torch.Tensor,
        q_norm: torch.Tensor | None,
        k_norm: torch.Tensor | None,
        eps: float,
    ) -> None:
        """Rotate in fp32; store in the cache's type."""
        n = self.batch.num_batched_tokens
        q, k, v = self._heads(qkv)
        if q_norm is not None and k_norm is not None:
            q.copy_(rms_norm(q, q_norm, eps))
            k.copy_(rms_norm(k, k_norm, eps))
        for heads in (q, k):
            a, b = heads.float().chunk(2, dim=-1)
            cosine, sine = self.cosine[:, None], self.sine[:, None]
            heads.copy_(torch.cat((a * cosine - b * sine, b * cosine + a * sine), dim=-1))
        assert len(self.blocks) == n, f"{len(self.blocks)} slots for {n} rows"
        self.cache.keys(layer)[self.blocks, :, :, self.offsets] = k
        self.cache.values(layer)[self.blocks, :, self.offsets] = v

    def attend(self, layer: int, qkv: torch.Tensor) -> torch.Tensor:
        """Gather the keys and values of each segment, mask, softmax in fp32."""
        c, batch = self.config, self.batch
        q, _, _ = self._heads(qkv)
        out = torch.zeros(len(qkv), c.num_heads * c.head_dim, dtype=qkv.dtype, device=qkv.device)
        for segment, seq_slot in enumerate(batch.segment_seq_slots.tolist()):
            first, last = batch.segment_rows[segment : segment + 2].tolist()
            keys, values, seen = self._seen(layer, seq_slot, first, last)
            queries = q[first:last].transpose(0, 1).float()
            group = c.num_heads // c.num_kv_heads
            scores = queries @ keys.repeat_interleave(group, 0).transpose(1, 2) * c.head_dim**-0.5
            weights = scores.masked_fill(~seen, float("-inf")).softmax(-1)
            mixed = weights @ values.repeat_interleave(group, 0)
            out[first:last] = mixed.transpose(0, 1).reshape(last - first, -1).to(out.dtype)
        return out

    def silu_mul(self, gate_up: torch.Tensor) -> torch.Tensor:
        """silu(gate) * up."""
        gate, up = gate_up.chunk(2, dim=-1)
        return torch.nn.functional.silu(gate) * up

    def move(self, source: list[int], target: list[int]) -> None:
        """One gather and one scatter per layer and half."""
        tokens = self.cache.block_size
        a, b = (torch.tensor(slots, device=self.cache.tensor.device) for slots in (source, target))
        for layer in range(self.config.num_layers):
            keys, values = self.cache.keys(layer), self.cache.values(layer)
            keys[b // tokens, :, :, b % tokens] = keys[a // tokens, :, :, a % tokens]
            values[b // tokens, :, b % tokens] = values[a // tokens, :, a % tokens]

    def _heads(self, qkv: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        c = self.config
        rows = qkv[: self.batch.num_batched_tokens].view(self.batch.num_batched_tokens, -1, c.head_dim)
        return rows[:, : c.num_heads], rows[:, c.num_heads : -c.num_kv_heads], rows[:, -c.num_kv_heads :]

    def _seen(
        self, layer: int, seq_slot: int, first: int, last: int
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Keys and values [kv head, position, head_dim] of a segment, and which of them each row attends to."""
        batch, tokens = self.batch, self.cache.block_size
        visible = batch.num_visible[first:last]
        path_start = batch.path_start[first : last + 1]
        paths = batch.path_slots[path_start[0] : path_start[-1]]
        nodes = {slot: place for place, slot in enumerate(dict.fromkeys(paths.tolist()))}
        num_table = int(visible.max())
        positions = torch.arange(num_table, device=self.tables.device)
        slots = self.tables[seq_slot, positions // tokens].long() * tokens + positions % tokens
        slots = torch.cat((slots, torch.tensor(list(nodes), dtype=torch.long, device=slots.device)))
        seen = torch.zeros(last - first, num_table + len(nodes), dtype=torch.bool)
        for row, count in enumerate(visible.tolist()):
            seen[row, :count] = True
            for slot in batch.path_slots[path_start[row] : path_start[row + 1]].tolist():
                seen[row, num_table + nodes[slot]] = True
        keys = self.cache.keys(layer)[slots // tokens, :, :, slots % tokens].float().transpose(0, 1)
        values = self.cache.values(layer)[slots // tokens, :, slots % tokens].float().transpose(0, 1)
        return keys, values, seen.to(slots.device)


def replaced(old: torch.Tensor, new: torch.Tensor) -> torch.Tensor:
    """`new`, in `old`'s memory on a GPU, because captured graphs read that address.

    On a CPU the old memory may be a mapped file, which must not be written; `new` itself is returned.
    """
    return old.copy_(new) if old.is_cuda else new


def rms_norm(x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
    """x / rms(x) * weight, in fp32 inside."""
    wide = x.float()
    scaled = wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + eps)
    return (scaled.to(x.dtype) * weight).to(x.dtype)
