"""Lay out a step in which every chunk has as many rows: its last token, the nodes of its draft, and padding.

The host does this while the device waits, so it is written for speed: plain lists, one per field, and one array in the
end. Filling arrays piece by piece takes two to four times as long at a few rows for each chunk.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from seer.engine.local.batch import Work

TOKEN, POSITION, SLOT, VISIBLE, NODES, LANE = range(6)
"""Fields of a row; gpu_kernels.py says what they mean."""


def lay_out(
    works: Sequence[Work],
    *,
    size: int,
    per_chunk: int,
    block_tokens: int,
    first_scratch_slot: int,
    spare_lane: int,
    spare_slot: int,
) -> NDArray[np.int32]:
    """[field][size·per_chunk]; also tells each work where its draws and its nodes' KV are.

    Rows that no chunk needs belong to the spare lane or see what their chunk sees, and write to the spare slot.
    """
    num_rows = size * per_chunk
    token, position, nodes = [0] * num_rows, [0] * num_rows, [0] * num_rows
    slot, visible, lane = [spare_slot] * num_rows, [1] * num_rows, [spare_lane] * num_rows
    scratch = first_scratch_slot
    for at, work in zip(range(0, num_rows, per_chunk), works, strict=False):
        active = work.active
        root, end = active.num_computed, at + per_chunk
        work.first_draw = at
        token[at], position[at] = active.tokens[-1], root
        slot[at] = active.blocks[root // block_tokens] * block_tokens + root % block_tokens
        visible[at:end] = [root + 1] * per_chunk
        lane[at:end] = [active.lane] * per_chunk
        if work.tree is None:
            continue
        first, last = at + 1, at + 1 + len(work.tree.tokens)
        token[first:last] = work.tree.tokens
        position[first:last], nodes[first:last] = ways(work.tree.parents, root)
        work.node_slots = list(range(scratch, scratch + last - first))
        slot[first:last] = work.node_slots
        scratch += last - first
    return np.array((token, position, slot, visible, nodes, lane), np.int32)


def ways(parents: Sequence[int | None], root: int) -> tuple[list[int], list[int]]:
    """For each node its position, and the bits of its ancestors and itself."""
    positions: list[int] = []
    masks: list[int] = []
    bit = 1
    for parent in parents:
        if parent is None:
            positions.append(root + 1)
            masks.append(bit)
        else:
            positions.append(positions[parent] + 1)
            masks.append(masks[parent] | bit)
        bit <<= 1
    return positions, masks
