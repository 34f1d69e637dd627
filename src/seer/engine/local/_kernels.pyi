# SPDX-License-Identifier: Apache-2.0
class Kernels:
    def __init__(
        self,
        *,
        num_layers: int,
        num_heads: int,
        num_kv_heads: int,
        head_dim: int,
        block_size: int,
        cache: int,
    ) -> None: ...
    def begin(
        self,
        *,
        num_batched_tokens: int,
        num_segments: int,
        segment_rows: int,
        segment_seq_slots: int,
        tables: int,
        table_width: int,
        num_visible: int,
        slots: int,
        path_start: int,
        path_slots: int,
        cosine: int,
        sine: int,
    ) -> None: ...
    def rotate_store(self, layer: int, qkv: int, q_norm: int, k_norm: int, eps: float) -> None: ...
    def attend(self, layer: int, qkv: int, out: int) -> None: ...
    def move(self, source: int, target: int, count: int) -> None: ...

def add_rms_norm(x: int, residual: int, weight: int, out: int, rows: int, dim: int, eps: float) -> None: ...
def silu_mul(gate_up: int, out: int, rows: int, inner: int) -> None: ...

PANEL: int

def pack(weight: int, panels: int, inner: int, outer: int) -> None: ...
def multiply(x: int, panels: int, bias: int, out: int, rows: int, inner: int, outer: int, width: int = 0) -> None: ...
def widths() -> list[int]: ...
def use_threads(count: int) -> None: ...
def sample(
    raw: int, processed: int, vocab: int, seed: int, position: int, greedy: bool
) -> tuple[int, float, float, float]: ...
def gumbel(seed: int, position: int, out: int, vocab: int) -> None: ...
