# SPDX-License-Identifier: Apache-2.0
"""Which CUDA graphs an engine with drafts on the GPU captures, and which of them serves a step.

A step of n requests that each verify d drafts has the *shape* (n, d): n·(1 + d) batched tokens. vLLM captures full
graphs for one list of token counts and looks only at those of the next greater count, so steps between two counts fall
to slower, piecewise graphs. We give each depth its own list of request counts instead.

Invariants
  1. Every shape that `Shapes.allows` has a full graph: one of its depth, for at least as many requests.
  2. No graph has more tokens than a step may have.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

REQUEST_COUNTS = (*range(1, 17), *range(20, 65, 4), *range(72, 129, 8), *range(144, 257, 16), *range(288, 1025, 32))
"""Requests that graphs are captured for: padding adds at most a quarter up to 20 requests, an eighth above."""
MAX_VERIFIED_TOKENS = 640
"""Most tokens of a step with drafts. A GPU is busy with arithmetic by then, so more drafts would not pay."""
DEPTHS = (1, 2, 4, 8, 16, 32, 64, 128)
"""Drafts per request that there are graphs for. Each depth costs a few seconds of capturing."""
TO_CAPTURE, CANDIDATES = "_capture_descs", "_candidates"
"""Attributes of vLLM's graph manager: graphs by mode, and the graphs to look at by (tokens, adapters)."""


@dataclass(frozen=True)
class Shapes:
    """The shapes of an engine: depths to choose from, and the requests each may have."""

    max_num_seqs: int
    max_draft_tokens: int
    max_step_tokens: int = MAX_VERIFIED_TOKENS
    fixed_tokens: int | None = None
    """Where every step is to draft so many, whatever it costs."""

    @property
    def depths(self) -> tuple[int, ...]:
        """0, powers of two, and the most; or 0 and the fixed one."""
        if self.fixed_tokens is not None:
            return (0, min(self.fixed_tokens, self.max_draft_tokens))
        return (0, *(depth for depth in DEPTHS if depth < self.max_draft_tokens), self.max_draft_tokens)

    def allows(self, num_requests: int, depth: int) -> bool:
        """Whether so many requests may verify so many drafts each."""
        return num_requests <= self.max_num_seqs and (
            not depth or self._captured(num_requests) * (1 + depth) <= self.max_step_tokens
        )

    def depths_of(self, num_requests: int) -> list[int]:
        """The depths to choose from for so many requests."""
        return [depth for depth in self.depths if self.allows(num_requests, depth)]

    def __iter__(self) -> Iterator[tuple[int, int]]:
        """Every (requests, depth) that a graph is captured for."""
        counts = [count for count in REQUEST_COUNTS if count < self.max_num_seqs]
        for depth in self.depths:
            for count in (*counts, self.max_num_seqs):
                if self.allows(count, depth):
                    yield count, depth

    def _captured(self, num_requests: int) -> int:
        """Requests of the graph that holds so many."""
        at = bisect_left(REQUEST_COUNTS, num_requests)
        return min(REQUEST_COUNTS[at], self.max_num_seqs) if at < len(REQUEST_COUNTS) else self.max_num_seqs


def capture_in(manager: Any, shapes: Iterable[tuple[int, int]]) -> bool:
    """Make vLLM's graph manager capture these full graphs; False if it has none, or captures in another way."""
    from vllm.config.compilation import CUDAGraphMode
    from vllm.v1.worker.gpu.cudagraph_utils import BatchExecutionDescriptor

    captured = getattr(manager, TO_CAPTURE, None)
    if not captured or CUDAGraphMode.FULL not in captured or not hasattr(manager, CANDIDATES):
        return False
    if manager.lora_capture_cases != [0]:
        return False
    mixed = [one for some in captured.values() for one in some if one.uniform_token_count is None]
    full = [
        BatchExecutionDescriptor(CUDAGraphMode.FULL, count * (1 + depth), count, 1 + depth) for count, depth in shapes
    ]
    kept = [one for one in mixed if one.cg_mode == CUDAGraphMode.FULL]
    # The largest is captured first: it sizes the buffer that all of them write to.
    captured[CUDAGraphMode.FULL] = sorted([*full, *kept], key=lambda one: one.num_tokens, reverse=True)
    setattr(manager, CANDIDATES, {(size, 0): found for size, found in enumerate(candidates(full, mixed)) if found})
    return True


def candidates(full: Sequence[Any], mixed: Sequence[Any]) -> list[list[Any]]:
    """For each number of tokens the graphs to look at, in this order: the smallest of each depth, then a mixed one."""
    by_width: dict[int | None, list[Any]] = {}
    for one in sorted([*full, *mixed], key=lambda one: one.num_tokens):
        by_width.setdefault(one.uniform_token_count, []).append(one)
    mixed_last = sorted(by_width, key=lambda width: (width is None, width or 0))
    most = max(one.num_tokens for one in (*full, *mixed))
    found = []
    for num_tokens in range(most + 1):
        smallest = (
            next((one for one in by_width[width] if one.num_tokens >= num_tokens), None) for width in mixed_last
        )
        found.append([one for one in smallest if one is not None])
    return found
