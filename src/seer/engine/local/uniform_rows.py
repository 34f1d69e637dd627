# SPDX-License-Identifier: Apache-2.0
"""Lay out a step in which every chunk has the same number of rows: its last token, its draft nodes, and padding.

The device waits while the host does this, so it is written for speed. It fills one plain list per field and makes one
array at the end: filling arrays piece by piece takes two to four times as long with a few rows per chunk. What follows
from a tree's shape is computed once and cached, because few shapes occur.

The likeliest path of a tree (the first child, its first child, and so on) stores its KV directly in the chunk's blocks.
If it is accepted, nothing is moved. If it is rejected, the positions are overwritten by the right tokens before they
are read. The other nodes go to scratch.

Invariants
  1. Padding rows write to the spare slot only.
  2. No two rows that are not padding share a KV slot.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache

import numpy as np
from numpy.typing import NDArray

from seer.engine.local.batch import Work

TOKEN, POSITION, SLOT, VISIBLE, NODES, SEQ_SLOT = range(6)
"""Fields of a row; gpu_kernels.py defines them."""


def lay_out(
    works: Sequence[Work],
    *,
    size: int,
    per_chunk: int,
    block_size: int,
    first_scratch_slot: int,
    spare_seq_slot: int,
    spare_slot: int,
) -> NDArray[np.int32]:
    """The rows, [field][size·per_chunk]; fill in `first_sample` and `node_slots` of each work.

    Padding rows after a chunk's own belong to the chunk's sequence slot, those of missing chunks to the spare one. All
    write to the spare slot.
    """
    num_batched_tokens = size * per_chunk
    token, position, nodes = [0] * num_batched_tokens, [0] * num_batched_tokens, [0] * num_batched_tokens
    slot, visible, seq_slot = (
        [spare_slot] * num_batched_tokens,
        [1] * num_batched_tokens,
        [spare_seq_slot] * num_batched_tokens,
    )
    scratch = first_scratch_slot
    for at, work in zip(range(0, num_batched_tokens, per_chunk), works, strict=False):
        active = work.active
        root, end = active.num_computed, at + per_chunk
        work.first_sample = at
        token[at], position[at] = active.tokens[-1], root
        slot[at] = active.blocks[root // block_size] * block_size + root % block_size
        visible[at:end] = [root + 1] * per_chunk
        seq_slot[at:end] = [active.seq_slot] * per_chunk
        if work.tree is None:
            continue
        first, last = at + 1, at + 1 + len(work.tree.tokens)
        form = form_of(tuple(work.tree.parents))
        token[first:last] = work.tree.tokens
        position[first:last] = [root + depth for depth in form.depths]
        nodes[first:last] = form.masks
        slots = list(range(scratch, scratch + last - first))
        for own, node in enumerate(form.likeliest, root + 1):
            slots[node] = active.blocks[own // block_size] * block_size + own % block_size
        work.node_slots = slot[first:last] = slots
        scratch += last - first
    return np.array((token, position, slot, visible, nodes, seq_slot), np.int32)


@dataclass(frozen=True, slots=True)
class Form:
    """What follows from the parents of a tree's nodes."""

    depths: list[int]
    """Depth of each node; 1 for the root's children."""
    masks: list[int]
    """For each node, the bits of its ancestors and itself."""
    likeliest: list[int]
    """The nodes of the likeliest path."""


@lru_cache(maxsize=4096)
def form_of(parents: tuple[int | None, ...]) -> Form:
    """Compute the form of a tree whose nodes have these parents."""
    depths: list[int] = []
    masks: list[int] = []
    for node, parent in enumerate(parents):
        depths.append(1 if parent is None else depths[parent] + 1)
        masks.append((0 if parent is None else masks[parent]) | 1 << node)
    return Form(depths, masks, _first_path(parents))


def _first_path(parents: Sequence[int | None]) -> list[int]:
    """The nodes of a tree's likeliest path: the first child of the root, its first child, and so on."""
    path: list[int] = []
    tip: int | None = None
    for node, parent in enumerate(parents):
        if parent == tip:
            path.append(node)
            tip = node
    return path
