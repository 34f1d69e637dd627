# SPDX-License-Identifier: Apache-2.0
"""Types of the native module; see csrc/drafting/bindings.cc."""

from typing import Any

import numpy as np
from numpy.typing import NDArray

class Index:
    def __init__(self, memory_limit_bytes: int) -> None: ...
    def set_prompt(self, group: int, tokens: NDArray[np.int32], /) -> bool: ...
    def append(
        self,
        groups: NDArray[np.uint64],
        requests: NDArray[np.uint64],
        previous_counts: NDArray[np.int64],
        tokens: NDArray[np.int32],
        offsets: NDArray[np.int64],
        out_lengths: NDArray[np.int64],
        /,
    ) -> None: ...
    def speculate(
        self,
        groups: NDArray[np.uint64],
        requests: NDArray[np.uint64],
        budgets: NDArray[np.int32],
        out_tokens: NDArray[np.int32],
        out_parents: NDArray[np.int32],
        out_confidence: NDArray[np.float32],
        out_counts: NDArray[np.int32],
        paths: int,
        min_confidence: float,
        match_min: int,
        match_max: int,
        learn: bool,
        /,
    ) -> None: ...
    def speculate_context(
        self,
        groups: NDArray[np.uint64],
        contexts: NDArray[np.int32],
        offsets: NDArray[np.int64],
        budgets: NDArray[np.int32],
        out_tokens: NDArray[np.int32],
        out_parents: NDArray[np.int32],
        out_confidence: NDArray[np.float32],
        out_counts: NDArray[np.int32],
        paths: int,
        min_confidence: float,
        match_min: int,
        match_max: int,
        /,
    ) -> None: ...
    def feedback(self, confidence: NDArray[np.float32], accepted: NDArray[np.bool_], /) -> None: ...
    def drop(self, groups: NDArray[np.uint64], /) -> int: ...
    def stats(self) -> dict[str, Any]: ...
    def length(self, group: int, request: int, /) -> int: ...
    def requests(self, group: int, /) -> list[int]: ...
    def read_tokens(self, group: int, request: int, start: int, out: NDArray[np.int32], /) -> int: ...
    def count(self, group: int, pattern: NDArray[np.int32], /) -> int: ...
    def followers(self, group: int, pattern: NDArray[np.int32], /) -> list[tuple[int, int]]: ...
    def anchor_length(self, group: int, request: int, /) -> int: ...
    def correct(self, raw: float, /) -> float: ...
    def check_integrity(self, group: int, /) -> str: ...
