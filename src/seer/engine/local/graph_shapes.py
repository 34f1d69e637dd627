"""Which captured graph a step runs in, and when a shape is worth a graph of its own.

A graph serves every step that fits into it; what it computes beyond the step is waste. Capturing another takes as long
as a good many wasted rows, and holds everybody up meanwhile, so a shape gets its own graph when the steps that could
have used it have wasted that much in larger ones, or when nothing larger is there. Steps that can also run kernel by
kernel waste what the host needs to launch them all.

    shape                kind of step
    Shape                every chunk has as many rows: its last token and its draft, or its last token alone
    MixedShape           anything: pieces of contexts beside chunks that decode

Pure: the same steps in the same order choose the same graphs.
"""

from __future__ import annotations

from collections import Counter
from typing import Generic, NamedTuple, Protocol, Self, TypeVar

BATCH_SIZES = (1, 2, 4, 8, 12, 16, 24, 32, 48, 64, 96, 128, 160, 192, 224, 256, 320, 384, 448, 512)
ROW_SIZES = (1, 2, 3, 5, 9, 12, 16, 24, 32)
"""Rows per chunk: its last token and up to 31 nodes. Few, because each costs a capture for every batch size it meets;
the deepest draft a budget allows, 8 tokens, fits without padding."""
DEPTHS = tuple(size - 1 for size in ROW_SIZES)
"""Draft tokens that fill a step's rows."""
MIXED_ROWS = (32, 64, 128, 256, 512)
"""Rows of a mixed step. With more the device computes for longer than the host launches."""
CAPTURE_ROWS = 2048
"""What a capture costs, in rows: about 14 ms for a model of 28 layers on an H200, where a row more takes 5 to 10 us."""
EAGER_ROWS = 1024
"""What a step costs beyond its rows when it runs kernel by kernel: half a capture."""


class Fitting(Protocol):
    """What a shape answers."""

    @property
    def num_batched_tokens(self) -> int:
        """Of the whole step."""

    def holds(self, other: Self) -> bool:
        """Whether a step of the other shape fits."""


class Shape(NamedTuple):
    """So many chunks, and so many rows for each of them."""

    num_chunks: int
    tokens_per_chunk: int

    @classmethod
    def of(cls, num_chunks: int, tokens_per_chunk: int) -> Shape:
        """The least that is captured and enough."""
        return cls(least_enough(num_chunks, BATCH_SIZES), least_enough(tokens_per_chunk, ROW_SIZES))

    @property
    def num_batched_tokens(self) -> int:
        """Of the whole step."""
        return self.num_chunks * self.tokens_per_chunk

    @property
    def num_nodes(self) -> int:
        """Draft nodes there is room for."""
        return self.num_batched_tokens - self.num_chunks

    def holds(self, other: Shape) -> bool:
        """Whether a step of the other shape fits."""
        return self.num_chunks >= other.num_chunks and self.tokens_per_chunk >= other.tokens_per_chunk


class MixedShape(NamedTuple):
    """So many rows in all, of so many chunks."""

    num_batched_tokens: int
    num_chunks: int
    has_trees: bool

    @classmethod
    def of(cls, num_batched_tokens: int, num_chunks: int, has_trees: bool) -> MixedShape | None:
        """The least that is captured and enough; None where nothing is."""
        if num_batched_tokens > MIXED_ROWS[-1]:
            return None
        return cls(least_enough(num_batched_tokens, MIXED_ROWS), least_enough(num_chunks, BATCH_SIZES), has_trees)

    def holds(self, other: MixedShape) -> bool:
        """Whether a step of the other shape fits."""
        enough = self.num_batched_tokens >= other.num_batched_tokens and self.num_chunks >= other.num_chunks
        return enough and self.has_trees >= other.has_trees


S = TypeVar("S", bound=Fitting)


class GraphShapes(Generic[S]):
    """The shapes captured so far, and what their absence has cost."""

    def __init__(self) -> None:
        self._captured: list[S] = []
        self._padding_tokens: Counter[S] = Counter()

    def choose(self, own: S, num_steps: int = 1) -> S:
        """The graph for so many steps; one that was never chosen before is to be captured now."""
        larger = self._smallest_for(own)
        if larger == own:
            return own
        if larger is not None and self._bears(own, num_steps * (larger.num_batched_tokens - own.num_batched_tokens)):
            return larger
        self._captured.append(own)
        return own

    def choose_or_eager(self, own: S) -> S | None:
        """The same for one step that can also run kernel by kernel: None says that it does."""
        larger = self._smallest_for(own)
        if larger == own:
            return own
        wasted = EAGER_ROWS if larger is None else min(EAGER_ROWS, larger.num_batched_tokens - own.num_batched_tokens)
        if self._bears(own, wasted):
            return larger if wasted < EAGER_ROWS else None
        self._captured.append(own)
        return own

    def _smallest_for(self, own: S) -> S | None:
        return min((shape for shape in self._captured if shape.holds(own)), key=_num_batched_tokens, default=None)

    def _bears(self, own: S, padding_tokens: int) -> bool:
        """Whether so much more waste is still less than a capture."""
        self._padding_tokens[own] += padding_tokens
        return self._padding_tokens[own] < CAPTURE_ROWS


def _num_batched_tokens(shape: Fitting) -> int:
    return shape.num_batched_tokens


def least_enough(size: int, sizes: tuple[int, ...]) -> int:
    """The least of `sizes` that is enough; beyond the last, a multiple of it."""
    for candidate in sizes:
        if candidate >= size:
            return candidate
    return -(-size // sizes[-1]) * sizes[-1]
