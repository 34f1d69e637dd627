# SPDX-License-Identifier: Apache-2.0
"""Rows of a step in which all chunks are alike, against the same rows made one by one."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

pytest.importorskip("torch")

from seer.drafting.base import DraftTree
from seer.engine.local.uniform_rows import NODES, POSITION, SEQ_SLOT, SLOT, TOKEN, VISIBLE, lay_out

BLOCK_SIZE, SCRATCH, SPARE_SEQ_SLOT, SPARE_SLOT = 4, 1000, 99, 777
PER_CHUNK = 6


@st.composite
def works(draw: st.DrawFn) -> list[Any]:
    made = []
    for seq_slot in range(draw(st.integers(1, 4))):
        num_computed = draw(st.integers(0, 26))
        size = draw(st.integers(0, PER_CHUNK - 1))
        parents = [draw(st.sampled_from([None, *range(node)])) for node in range(size)]
        tokens = draw(st.lists(st.integers(0, 500), min_size=size, max_size=size))
        active = SimpleNamespace(
            tokens=[7] * num_computed + [draw(st.integers(0, 500))], num_computed=num_computed, seq_slot=seq_slot,
            blocks=draw(st.permutations(range(8 * seq_slot, 8 * seq_slot + 8))),
        )  # fmt: skip
        tree = DraftTree(tokens, parents, [0.5] * size) if size else None
        made.append(SimpleNamespace(active=active, tree=tree, first_sample=-1, node_slots=None))
    return made


def first_child(parents: list[int | None], parent: int | None) -> int:
    return parents.index(parent)


@given(works(), st.integers(0, 2))
def test_every_row_is_what_its_token_or_node_says(made: list[Any], num_spare: int) -> None:
    size = len(made) + num_spare
    rows = lay_out(
        made, size=size, per_chunk=PER_CHUNK, block_size=BLOCK_SIZE, first_scratch_slot=SCRATCH,
        spare_seq_slot=SPARE_SEQ_SLOT, spare_slot=SPARE_SLOT,
    )  # fmt: skip
    assert rows.shape == (6, size * PER_CHUNK)
    assert rows.dtype == np.int32
    table = rows.reshape(6, size, PER_CHUNK)
    next_scratch, written = SCRATCH, []
    for index, work in enumerate(made):
        active, root = work.active, work.active.num_computed
        assert work.first_sample == index * PER_CHUNK
        at = table[:, index]
        assert (at[SEQ_SLOT] == active.seq_slot).all()
        assert (at[VISIBLE] == root + 1).all()
        slot = active.blocks[root // BLOCK_SIZE] * BLOCK_SIZE + root % BLOCK_SIZE
        assert at[[TOKEN, POSITION, SLOT, NODES], 0].tolist() == [active.tokens[-1], root, slot, 0]
        count = len(work.tree.tokens) if work.tree else 0
        for node in range(count):
            way, parent = [node], work.tree.parents[node]
            while parent is not None:
                way.append(parent)
                parent = work.tree.parents[parent]
            place = root + len(way)
            likeliest = all(one == first_child(work.tree.parents, work.tree.parents[one]) for one in way)
            slot = active.blocks[place // BLOCK_SIZE] * BLOCK_SIZE + place % BLOCK_SIZE
            slot = slot if likeliest else next_scratch
            expected = [work.tree.tokens[node], place, slot, sum(1 << one for one in way)]
            assert at[[TOKEN, POSITION, SLOT, NODES], 1 + node].tolist() == expected
            assert work.node_slots[node] == slot
            next_scratch += 1
        written += at[SLOT, : 1 + count].tolist()
        assert (at[SLOT, 1 + count :] == SPARE_SLOT).all()
    assert len(set(written)) == len(written), "two rows share a slot"
    assert (table[SEQ_SLOT, len(made) :] == SPARE_SEQ_SLOT).all()
    assert (table[SLOT, len(made) :] == SPARE_SLOT).all()
    assert (table[VISIBLE, len(made) :] == 1).all()
