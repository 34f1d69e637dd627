# SPDX-License-Identifier: Apache-2.0
import numpy as np
from numpy.typing import NDArray

class BurstChunk:
    tokens: list[int]
    logprobs: list[float]
    raw_logprobs: list[float]
    stopped: bool
    num_drafted: int
    num_accepted: int

class DraftBurst:
    def __init__(self, *, block_size: int, first_scratch_slot: int, spare_seq_slot: int, spare_slot: int) -> None: ...
    def add(self, *, seq_slot: int, root: int, token: int, remaining: int, stop_ids: list[int]) -> None: ...
    def __len__(self) -> int: ...
    def __getitem__(self, index: int) -> BurstChunk: ...
    num_live: int
    num_near_ties: int
    tried: list[int]
    taken: list[int]
    def limit(self, most: NDArray[np.int32], out: NDArray[np.int32]) -> None: ...
    def lay_out(
        self,
        tokens: NDArray[np.int32],
        parents: NDArray[np.int32],
        counts: NDArray[np.int32],
        tables: NDArray[np.int32],
        num_chunks: int,
        tokens_per_chunk: int,
        max_moves: int,
        inputs: NDArray[np.int32],
    ) -> bool: ...
    def settle(
        self,
        sampled: NDArray[np.float32],
        tables: NDArray[np.int32],
        near_tie: float,
        tokens: NDArray[np.int32],
        offsets: NDArray[np.int64],
    ) -> None: ...
    def take_moves(self) -> tuple[list[int], list[int]]: ...
