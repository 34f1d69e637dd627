"""Which captured graph a step runs in, and when a shape is worth a graph of its own.

A graph serves every step that fits into it; what it computes beyond the step is waste. Capturing another takes as long
as a good many wasted rows, and holds everybody up meanwhile, so a shape gets its own graph when the steps that could
have used it have wasted that much in larger ones, or when nothing larger is there.

Pure: the same steps in the same order choose the same graphs.
"""

from __future__ import annotations

from collections import Counter
from typing import NamedTuple

BATCH_SIZES = (1, 2, 4, 8, 12, 16, 24, 32, 48, 64, 96, 128, 160, 192, 224, 256, 320, 384, 448, 512)
ROW_SIZES = (1, 2, 3, 5, 9, 12, 16, 24, 32)
"""Rows per chunk: its last token and up to 31 nodes. Few, because each costs a capture for every batch size it meets;
the deepest draft a budget allows, 8 tokens, fits without padding."""
CAPTURE_ROWS = 8192
"""What a capture costs, in rows: 40 ms for a model of 28 layers on an H200, where a row more takes about 5 us."""


class Shape(NamedTuple):
    """Of a graph: chunks, and rows for each of them."""

    num_chunks: int
    rows_per_chunk: int

    @property
    def num_rows(self) -> int:
        """Of the whole step."""
        return self.num_chunks * self.rows_per_chunk

    def holds(self, other: Shape) -> bool:
        """Whether a step of the other shape fits."""
        return self.num_chunks >= other.num_chunks and self.rows_per_chunk >= other.rows_per_chunk


class GraphShapes:
    """The shapes captured so far, and what their absence has cost."""

    def __init__(self) -> None:
        self._captured: list[Shape] = []
        self._wasted_rows: Counter[Shape] = Counter()

    def choose(self, num_chunks: int, rows_per_chunk: int, num_steps: int = 1) -> Shape:
        """The graph for so many steps; one that was never chosen before is to be captured now."""
        own = Shape(least_enough(num_chunks, BATCH_SIZES), least_enough(rows_per_chunk, ROW_SIZES))
        if own in self._captured:
            return own
        larger = min((shape for shape in self._captured if shape.holds(own)), key=_rows, default=None)
        if larger is not None:
            self._wasted_rows[own] += num_steps * (larger.num_rows - own.num_rows)
            if self._wasted_rows[own] < CAPTURE_ROWS:
                return larger
        self._captured.append(own)
        return own


def _rows(shape: Shape) -> int:
    return shape.num_rows


def least_enough(size: int, sizes: tuple[int, ...]) -> int:
    """The least of `sizes` that is enough; beyond the last, a multiple of it."""
    for candidate in sizes:
        if candidate >= size:
            return candidate
    return -(-size // sizes[-1]) * sizes[-1]
