# SPDX-License-Identifier: Apache-2.0
"""Choose the captured graph that a step runs in, and decide when a shape gets a graph of its own.

A graph serves every step that fits into it. Padding tokens are wasted work. Capturing another graph delays all chunks
by as much as a certain number of padding tokens. So a shape gets its own graph when its steps have wasted that many in
larger graphs, or when there is no larger one. A step that can also run kernel by kernel wastes the time of the launches
instead.

    shape                kind of step
    Shape                every chunk has the same number of tokens: its last token and its draft, or its last token only
    MixedShape           anything: pieces of contexts beside chunks that decode

Pure: the same steps in the same order choose the same graphs.
"""

from __future__ import annotations

from collections import Counter
from typing import Generic, NamedTuple, Protocol, Self, TypeVar

BATCH_SIZES = (1, 2, 4, 8, 12, 16, 24, 32, 48, 64, 96, 128, 160, 192, 224, 256, 320, 384, 448, 512)
"""Numbers of chunks a graph is captured for: close enough that padding stays below half of a step."""
CHUNK_SIZES = (1, 2, 3, 5, 9, 12, 16, 24, 32)
"""Tokens per chunk: its last token and up to 31 draft nodes. Few sizes, because each is captured for every batch size
it is used with. The deepest draft a budget allows, 8 tokens, fits without padding."""
DEPTHS = tuple(size - 1 for size in CHUNK_SIZES)
"""Draft tokens per chunk that fit without padding."""
MIXED_SIZES = (32, 64, 128, 256, 512)
"""Batched tokens of a mixed step. With more, the device computes for longer than the host needs to launch kernels."""
CAPTURE_COST_TOKENS = 2048
"""Cost of a capture, in padding tokens: about 14 ms for a model of 28 layers on an H200, where a token takes 5 to 10
us."""
EAGER_COST_TOKENS = 1024
"""Extra cost of a step that runs kernel by kernel, in padding tokens: half a capture."""


class Fitting(Protocol):
    """What both kinds of shape have in common."""

    @property
    def num_batched_tokens(self) -> int:
        """Tokens of the whole step, padding included."""

    def holds(self, other: Self) -> bool:
        """Whether a step of the other shape fits."""


class Shape(NamedTuple):
    """A number of chunks, and of tokens for each of them."""

    num_chunks: int
    tokens_per_chunk: int

    @classmethod
    def of(cls, num_chunks: int, tokens_per_chunk: int) -> Shape:
        """The smallest captured sizes that fit."""
        return cls(least_enough(num_chunks, BATCH_SIZES), least_enough(tokens_per_chunk, CHUNK_SIZES))

    @property
    def num_batched_tokens(self) -> int:
        """Tokens of the whole step, padding included."""
        return self.num_chunks * self.tokens_per_chunk

    @property
    def num_nodes(self) -> int:
        """Draft nodes that fit."""
        return self.num_batched_tokens - self.num_chunks

    def holds(self, other: Shape) -> bool:
        """Whether a step of the other shape fits."""
        return self.num_chunks >= other.num_chunks and self.tokens_per_chunk >= other.tokens_per_chunk


class MixedShape(NamedTuple):
    """A number of batched tokens in all, and of chunks."""

    num_batched_tokens: int
    num_chunks: int
    has_trees: bool

    @classmethod
    def of(cls, num_batched_tokens: int, num_chunks: int, has_trees: bool) -> MixedShape | None:
        """The smallest captured sizes that fit; None if the step is too large for a graph."""
        if num_batched_tokens > MIXED_SIZES[-1]:
            return None
        return cls(least_enough(num_batched_tokens, MIXED_SIZES), least_enough(num_chunks, BATCH_SIZES), has_trees)

    def holds(self, other: MixedShape) -> bool:
        """Whether a step of the other shape fits."""
        enough = self.num_batched_tokens >= other.num_batched_tokens and self.num_chunks >= other.num_chunks
        return enough and self.has_trees >= other.has_trees


S = TypeVar("S", bound=Fitting)


class GraphShapes(Generic[S]):
    """The shapes captured so far, and the padding that each missing shape has cost."""

    def __init__(self) -> None:
        self._captured: list[S] = []
        self._padding_tokens: Counter[S] = Counter()

    def choose(self, own: S, num_steps: int = 1) -> S:
        """The shape to run `num_steps` steps in. A shape returned for the first time must be captured now."""
        larger = self._smallest_for(own)
        if larger == own:
            return own
        if larger is not None and self._bears(own, num_steps * (larger.num_batched_tokens - own.num_batched_tokens)):
            return larger
        self._captured.append(own)
        return own

    def choose_or_eager(self, own: S) -> S | None:
        """As `choose`, for one step that can also run kernel by kernel. None means that it should."""
        larger = self._smallest_for(own)
        if larger == own:
            return own
        wasted = EAGER_COST_TOKENS
        if larger is not None:
            wasted = min(wasted, larger.num_batched_tokens - own.num_batched_tokens)
        if self._bears(own, wasted):
            return larger if wasted < EAGER_COST_TOKENS else None
        self._captured.append(own)
        return own

    def _smallest_for(self, own: S) -> S | None:
        return min((shape for shape in self._captured if shape.holds(own)), key=_num_batched_tokens, default=None)

    def _bears(self, own: S, padding_tokens: int) -> bool:
        """Add to the padding that this shape has cost; say whether it is still less than a capture."""
        self._padding_tokens[own] += padding_tokens
        return self._padding_tokens[own] < CAPTURE_COST_TOKENS


def _num_batched_tokens(shape: Fitting) -> int:
    return shape.num_batched_tokens


def least_enough(size: int, sizes: tuple[int, ...]) -> int:
    """The smallest of `sizes` that is at least `size`; beyond the last, a multiple of the last."""
    for candidate in sizes:
        if candidate >= size:
            return candidate
    return -(-size // sizes[-1]) * sizes[-1]
