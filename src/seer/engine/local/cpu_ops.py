# SPDX-License-Identifier: Apache-2.0
"""The arithmetic of a decoder layer on a CPU in fp32, by the native kernels.

Invariant: a row's result has the same bits whatever else is in the batch (csrc/engine/product.h and kernels.h say how).
So tokens do not depend on batch neighbours, chunking or drafts, not even where two tokens nearly tie.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import torch

from seer.engine.local import huge_pages
from seer.engine.local.batch import Batch
from seer.engine.local.cache import KVCache
from seer.engine.local.ops import Linear
from seer.engine.local.rotary import RotaryTable

try:
    from seer.engine.local import _kernels
except ImportError:  # a source tree that was not built
    _kernels = None  # type: ignore[assignment]

kernels = _kernels


def available() -> bool:
    """Whether the native kernels are built."""
    return kernels is not None


class PanelLinear:
    """A matrix in panels, the order in which csrc/engine/product.h multiplies."""

    def __init__(self, panels: torch.Tensor, bias: torch.Tensor | None, outer: int) -> None:
        self.panels, self.bias = panels, bias
        self.inner, self.outer = panels.shape[1], outer

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        """x [rows, in] -> [rows, out]."""
        assert x.is_contiguous(), f"rows with strides {x.stride()}"
        rows = len(x)
        out = torch.empty((rows, self.outer))
        bias = 0 if self.bias is None else self.bias.data_ptr()
        kernels.multiply(x.data_ptr(), self.panels.data_ptr(), bias, out.data_ptr(), rows, self.inner, self.outer)
        return out

    def replace(self, other: Linear) -> None:
        """Use another matrix's panels."""
        assert isinstance(other, PanelLinear), f"{type(other).__name__} replaces a PanelLinear"
        self.panels, self.bias = other.panels, other.bias


def panels_shape(weight: torch.Tensor) -> torch.Size:
    """[panel, in, outputs of a panel] of a matrix [out, in]."""
    outer, inner = weight.shape
    return torch.Size((-(-outer // kernels.PANEL), inner, kernels.PANEL))


def fill_panels(panels: torch.Tensor, weight: torch.Tensor) -> None:
    """Lay a matrix out in panels."""
    outer, inner = weight.shape
    weight = weight.contiguous()  # by name: an address alone would not keep a copy alive
    kernels.pack(weight.data_ptr(), panels.data_ptr(), inner, outer)


def to_panels(weight: torch.Tensor) -> torch.Tensor:
    """A matrix in panels, in newly allocated memory."""
    panels = torch.empty(panels_shape(weight))
    huge_pages.ask(panels.data_ptr(), panels.nbytes)
    fill_panels(panels, weight)
    return panels


class CpuOps:
    """The native fp32 kernels. Implements `Ops`."""

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
            block_size=cache.block_size,
            cache=cache.tensor.data_ptr(),
        )
        self._alive: tuple[Any, ...] = ()

    def linear(self, weight: torch.Tensor, bias: torch.Tensor | None, *, wide: bool = False) -> Linear:
        """Lay the matrix out in panels."""
        return PanelLinear(to_panels(weight), bias, len(weight))

    def begin(self, batch: Batch, tables: torch.Tensor) -> None:
        """Pass the batch's arrays to the kernels, and keep them alive until the next batch."""
        kernels.use_threads(torch.get_num_threads())
        cosine, sine = self.rotary.rows(torch.from_numpy(batch.positions))
        self._alive = (batch, tables, cosine, sine)
        self.kernels.begin(
            num_batched_tokens=batch.num_batched_tokens,
            num_segments=len(batch.works),
            segment_rows=_address(batch.segment_rows),
            segment_seq_slots=_address(batch.segment_seq_slots),
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
        """In place, then store in the cache."""
        q_address = 0 if q_norm is None else q_norm.data_ptr()
        k_address = 0 if k_norm is None else k_norm.data_ptr()
        self.kernels.rotate_store(layer, qkv.data_ptr(), q_address, k_address, eps)

    def attend(self, layer: int, qkv: torch.Tensor) -> torch.Tensor:
        """Attention that reads the paged cache in place."""
        c = self.config
        out = torch.empty((len(qkv), c.num_heads * c.head_dim))
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
