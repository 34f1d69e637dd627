"""The arithmetic of a decoder layer on a CPU in fp32: oneDNN products and the native kernels.

Why its own file: with one thread these give, for each row, the same bits whatever else is in the batch.
oneDNN's packed product keeps one order of summation for every number of rows but 1 (measured for all products
of SmolLM2 and Qwen2.5-1.5B, 1 to 1,024 rows; tests/unit/engine holds it), so batches are padded to
`min_rows`, which is also faster: 4 rows take 0.8 of the time of 1. The rest is in csrc/engine/kernels.cc,
whose header states the same of it. Hence tokens do not depend on batch neighbours, chunking or drafts, to the
bit and not only up to near-ties.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import torch

from seer.engine.local import huge_pages
from seer.engine.local.batch import Batch
from seer.engine.local.cache import KVCache
from seer.engine.local.ops import Linear, PlainLinear
from seer.engine.local.rotary import RotaryTable

try:
    from seer.engine.local import _kernels
except ImportError:  # a source tree that was not built
    _kernels = None  # type: ignore[assignment]

kernels = _kernels

PACK_ROWS_HINT = 32
"""oneDNN lays packed weights out for this many rows; layouts for 1 to 32 measured within 3% of each other."""


def available() -> bool:
    """Whether the native kernels are built and PyTorch has oneDNN."""
    return kernels is not None and bool(torch.backends.mkldnn.is_available())  # type: ignore[no-untyped-call]


class PackedLinear:
    """A matrix in oneDNN's own order."""

    def __init__(self, weight: torch.Tensor, bias: torch.Tensor | None) -> None:
        self.packed = torch.ops.mkldnn._reorder_linear_weight(weight, PACK_ROWS_HINT)
        huge_pages.ask(torch.ops.mkldnn.data_ptr(self.packed), torch.ops.mkldnn._nbytes(self.packed), touched=True)
        self.bias = bias
        self.multiply = torch.ops.mkldnn._linear_pointwise.default

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        """x [rows, in] -> [rows, out]."""
        product: torch.Tensor = self.multiply(x, self.packed, self.bias, "none", [], "")
        return product

    def replace(self, other: Linear) -> None:
        """Take another packed matrix."""
        assert isinstance(other, PackedLinear), f"{type(other).__name__} replaces a PackedLinear"
        self.packed, self.bias = other.packed, other.bias


class CpuOps:
    """fp32 on one thread, the same bits for a row in any batch."""

    min_rows = 4

    def __init__(self, cache: KVCache, rotary: RotaryTable) -> None:
        assert kernels is not None, "the native kernels are not built"
        assert cache.tensor.dtype == torch.float32, f"native kernels work in float32, not {cache.tensor.dtype}"
        c = cache.config
        self.config, self.rotary, self.cache = c, rotary, cache
        self.kernels = kernels.Kernels(
            num_layers=c.num_layers,
            num_heads=c.num_heads,
            num_kv_heads=c.num_kv_heads,
            head_dim=c.head_dim,
            block_tokens=cache.block_tokens,
            cache=cache.tensor.data_ptr(),
        )
        self._alive: tuple[Any, ...] = ()

    def linear(self, weight: torch.Tensor, bias: torch.Tensor | None, *, wide: bool = False) -> Linear:
        """Pack the matrix; shapes oneDNN has no packed form for stay as they are."""
        try:
            return PackedLinear(weight, bias)
        except RuntimeError:
            return PlainLinear(weight, bias)

    def begin(self, batch: Batch, tables: torch.Tensor) -> None:
        """Hand the kernels the batch's arrays, and keep them alive until the next batch."""
        cosine, sine = self.rotary.rows(torch.from_numpy(batch.positions))
        self._alive = (batch, tables, cosine, sine)
        self.kernels.begin(
            num_rows=batch.num_rows,
            num_segments=len(batch.works),
            segment_rows=_address(batch.segment_rows),
            segment_lanes=_address(batch.segment_lanes),
            tables=tables.data_ptr(),
            table_width=tables.shape[1],
            num_visible=_address(batch.num_visible),
            slots=_address(batch.slots),
            path_start=_address(batch.path_start),
            path_slots=_address(batch.path_slots),
            cosine=cosine.data_ptr(),
            sine=sine.data_ptr(),
        )

    def add_rms_norm(
        self, x: torch.Tensor | None, hidden: torch.Tensor, weight: torch.Tensor, eps: float
    ) -> torch.Tensor:
        """Add and normalise in one pass."""
        out = torch.empty_like(hidden)
        rows, dim = hidden.shape
        added = 0 if x is None else x.data_ptr()
        kernels.add_rms_norm(added, hidden.data_ptr(), weight.data_ptr(), out.data_ptr(), rows, dim, eps)
        return out

    def rotate_store(
        self,
        layer: int,
        qkv: torch.Tensor,
        q_norm: torch.Tensor | None,
        k_norm: torch.Tensor | None,
        eps: float,
    ) -> None:
        """In place, then into the cache."""
        q_address = 0 if q_norm is None else q_norm.data_ptr()
        k_address = 0 if k_norm is None else k_norm.data_ptr()
        self.kernels.rotate_store(layer, qkv.data_ptr(), q_address, k_address, eps)

    def attend(self, layer: int, qkv: torch.Tensor) -> torch.Tensor:
        """Attention over the cache as it lies, nothing gathered."""
        c = self.config
        rows = len(qkv)
        make = torch.empty if rows == self._alive[0].num_rows else torch.zeros  # padding stays finite
        out = make((rows, c.num_heads * c.head_dim))
        self.kernels.attend(layer, qkv.data_ptr(), out.data_ptr())
        return out

    def silu_mul(self, gate_up: torch.Tensor) -> torch.Tensor:
        """silu(gate) * up."""
        rows, width = gate_up.shape
        out = torch.empty((rows, width // 2))
        kernels.silu_mul(gate_up.data_ptr(), out.data_ptr(), rows, width // 2)
        return out

    def move(self, source: list[int], target: list[int]) -> None:
        """Copy slot by slot."""
        a, b = np.array(source, np.int64), np.array(target, np.int64)
        self.kernels.move(_address(a), _address(b), len(a))


def _address(array: np.ndarray[Any, Any]) -> int:
    return array.ctypes.data
