# SPDX-License-Identifier: Apache-2.0
"""One forward pass, token by token: which tokens are batched, where their KV goes, and what each of them attends to.

Each batched token is one row of the activations. The rows of one chunk are consecutive (a segment): a piece of its
context, or its last token followed by the nodes of its draft tree.

    batched token         its KV goes to          it attends to
    context, last token   its own place (table)   the table's positions up to its own
    draft node            a scratch slot          the table up to the tree's root, then its ancestors and itself

A rejected draft node is therefore never in a chunk's blocks. An accepted node is moved there (engine.py, `settle`).
On a GPU, uniform_rows.py lays out the steps in which all chunks decode. It writes the likeliest path of a tree directly
into the chunk's blocks.

Invariants
  1. Rows that are sampled from come in the order of `works`, and within one in tree order (root first).
  2. No two rows of a batch share a KV slot.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from seer.drafting.base import DraftTree
from seer.engine.local.active import ActiveChunk

Int32 = NDArray[np.int32]
Int64 = NDArray[np.int64]


@dataclass(slots=True)
class Work:
    """What a step computes for one chunk."""

    active: ActiveChunk
    num_tokens: int
    """Known tokens to compute, from `active.num_computed` on."""
    tree: DraftTree | None = None
    first_sample: int = 0
    """Index of its first sampled row among all sampled rows; filled by `build`."""
    node_slots: list[int] | None = None
    """KV slots of the tree's nodes; filled by `build`."""

    samples: bool = field(init=False)
    """Whether its last known token is batched, so that the next one is sampled."""

    def __post_init__(self) -> None:
        """Computed once, because `num_computed` changes before the work is dropped."""
        self.samples = self.active.num_computed + self.num_tokens == len(self.active.tokens)

    @property
    def num_batched_tokens(self) -> int:
        """Tokens it adds to the forward pass, draft nodes included."""
        return self.num_tokens + (len(self.tree.tokens) if self.tree else 0)


@dataclass(slots=True)
class Batch:
    """The arrays of one forward pass, on the host."""

    works: list[Work]
    num_batched_tokens: int
    tokens: Int64
    positions: Int64
    slots: Int64
    segment_rows: Int32
    segment_seq_slots: Int32
    num_visible: Int32
    path_start: Int32
    path_slots: Int64
    sample_rows: Int64
    """Rows whose next token is sampled."""


def build(works: list[Work], block_size: int, first_scratch_slot: int) -> Batch:
    """Lay out the batched tokens of the given works."""
    tokens: list[int] = []
    positions: list[int] = []
    slots: list[int] = []
    visible: list[int] = []
    paths: list[int] = []
    path_start = [0]
    segment_rows = [0]
    sample_rows: list[int] = []
    scratch = first_scratch_slot
    for work in works:
        active = work.active
        start, stop = active.num_computed, active.num_computed + work.num_tokens
        tokens.extend(active.tokens[start:stop])
        positions.extend(range(start, stop))
        visible.extend(range(start + 1, stop + 1))
        blocks = active.blocks
        slots.extend(blocks[at // block_size] * block_size + at % block_size for at in range(start, stop))
        path_start.extend([len(paths)] * work.num_tokens)
        if work.samples:
            work.first_sample = len(sample_rows)
            sample_rows.append(len(tokens) - 1)
        if work.tree is not None:
            node_paths: list[list[int]] = []
            for token, parent in zip(work.tree.tokens, work.tree.parents, strict=True):
                path = [*(node_paths[parent] if parent is not None else ()), scratch]
                node_paths.append(path)
                sample_rows.append(len(tokens))
                tokens.append(token)
                positions.append(stop - 1 + len(path))
                slots.append(scratch)
                visible.append(stop)
                paths.extend(path)
                path_start.append(len(paths))
                scratch += 1
            work.node_slots = [path[-1] for path in node_paths]
        segment_rows.append(len(tokens))
    return Batch(
        works=works,
        num_batched_tokens=len(tokens),
        tokens=np.array(tokens, np.int64),
        positions=np.array(positions, np.int64),
        slots=np.array(slots, np.int64),
        segment_rows=np.array(segment_rows, np.int32),
        segment_seq_slots=np.array([work.active.seq_slot for work in works], np.int32),
        num_visible=np.array(visible, np.int32),
        path_start=np.array(path_start, np.int32),
        path_slots=np.array(paths, np.int64),
        sample_rows=np.array(sample_rows, np.int64),
    )
