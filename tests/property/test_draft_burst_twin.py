# SPDX-License-Identifier: Apache-2.0
"""Verification steps in native code, against the Python functions that define the layout and the walk."""

from __future__ import annotations

from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

pytest.importorskip("torch")

from seer.drafting.base import DraftTree
from seer.engine.local._draft_burst import DraftBurst
from seer.engine.local.tree_walk import Walk, walk
from seer.engine.local.uniform_rows import lay_out

BLOCK_SIZE, SCRATCH, SPARE_SEQ_SLOT, SPARE_SLOT, NEAR_TIE = 4, 1000, 99, 777, 0.25
NUM_BLOCKS, VOCABULARY, MAX_NODES = 12, 3, 5
NUMBERS = np.array([2.0**-k for k in range(1, 8)], np.float32)


@dataclass
class Twin:
    """One chunk, kept in plain Python."""

    seq_slot: int
    blocks: list[int]
    tokens: list[int]
    remaining: int
    stop_ids: frozenset[int]
    generated: list[tuple[int, float, float]] = field(default_factory=list)
    stopped: bool = False
    num_drafted: int = 0
    num_accepted: int = 0
    limit: int = 0

    @property
    def num_computed(self) -> int:
        return len(self.tokens) - 1

    @property
    def live(self) -> bool:
        return not self.stopped and self.remaining > 0

    def slot(self, position: int) -> int:
        return self.blocks[position // BLOCK_SIZE] * BLOCK_SIZE + position % BLOCK_SIZE


@st.composite
def chunks(draw: st.DrawFn) -> list[Twin]:
    made = []
    for index in range(draw(st.integers(1, 4))):
        num_known, remaining = draw(st.integers(1, 20)), draw(st.integers(1, 20))
        made.append(
            Twin(
                seq_slot=draw(st.sampled_from([2 * index, 2 * index + 1])),
                blocks=draw(st.permutations(range(NUM_BLOCKS * index, NUM_BLOCKS * (index + 1)))),
                tokens=[0] * (num_known - 1) + [draw(st.integers(0, VOCABULARY - 1))],
                remaining=remaining,
                stop_ids=draw(st.sampled_from([frozenset(), frozenset({1}), frozenset({0, 2})])),
            )
        )
    return made


def a_tree(dice: np.random.Generator, most: int) -> DraftTree:
    tokens: list[int] = []
    parents: list[int | None] = []
    for _ in range(dice.integers(0, most + 1)):
        parent = int(dice.integers(-1, len(tokens)))
        token = int(dice.integers(0, VOCABULARY))
        siblings = [t for t, p in zip(tokens, parents, strict=True) if p == (None if parent < 0 else parent)]
        if token not in siblings:
            tokens.append(token)
            parents.append(None if parent < 0 else parent)
    return DraftTree(tokens, parents)


def settle(
    twin: Twin, tree: DraftTree | None, slots: list[int] | None, sampled: np.ndarray, tally: list[tuple[int, Walk]]
) -> list[tuple[int, int]]:
    """What `Engine.settle` does to a chunk; returns the moves, and tallies what was allowed and the way taken."""
    tokens = sampled[:, 0].view(np.int32).tolist()
    way = walk(tree, tokens, twin.remaining, twin.stop_ids)
    moves = []
    for depth, node in enumerate(way.nodes):
        assert slots is not None
        own = twin.slot(len(twin.tokens) + depth)
        if slots[node] != own:
            moves.append((slots[node], own))
    emitted = [tokens[row] for row in way.rows]
    tally.append((twin.limit, way))
    twin.generated += [(tokens[row], sampled[row, 1], sampled[row, 2]) for row in way.rows]
    twin.tokens += emitted
    twin.remaining -= len(emitted)
    twin.stopped = way.stopped
    twin.num_drafted += len(tree.tokens) if tree else 0
    twin.num_accepted += len(way.nodes)
    return moves


@settings(max_examples=300, deadline=None)
@given(chunks(), st.integers(0, 2**32 - 1), st.integers(0, 2))
def test_steps_are_those_of_the_specification(twins: list[Twin], seed: int, num_spare: int) -> None:
    dice = np.random.default_rng(seed)
    tables = np.zeros((2 * len(twins), NUM_BLOCKS), np.int32)
    for twin in twins:
        tables[twin.seq_slot] = twin.blocks
    burst = DraftBurst(
        block_size=BLOCK_SIZE, first_scratch_slot=SCRATCH, spare_seq_slot=SPARE_SEQ_SLOT, spare_slot=SPARE_SLOT
    )
    for twin in twins:
        burst.add(
            seq_slot=twin.seq_slot, root=twin.num_computed, token=twin.tokens[-1], remaining=twin.remaining,
            stop_ids=sorted(twin.stop_ids),
        )  # fmt: skip
    limits, offsets = np.empty(len(twins), np.int32), np.empty(len(twins) + 1, np.int64)
    due: list[tuple[int, int]] = []
    tally: list[tuple[int, Walk]] = []
    num_near_ties = 0
    for _ in range(4):
        live = [twin for twin in twins if twin.live]
        assert burst.num_live == len(live)
        if not live:
            break
        mosts = dice.integers(0, MAX_NODES + 1, len(twins), np.int32)
        burst.limit(mosts, limits)
        for most, twin in zip(mosts.tolist(), twins, strict=True):
            twin.limit = min(most, twin.remaining - 1) if twin.live else 0
        assert limits.tolist() == [twin.limit for twin in twins]
        trees = [a_tree(dice, int(most)) for most in limits]
        tokens, parents = np.zeros((2, len(twins), MAX_NODES), np.int32)
        for row, tree in enumerate(trees):
            tokens[row, : len(tree.tokens)] = tree.tokens
            parents[row, : len(tree.tokens)] = [-1 if parent is None else parent for parent in tree.parents]
        counts = np.array([len(tree.tokens) for tree in trees], np.int32)
        size, per_chunk = len(live) + num_spare, 1 + MAX_NODES

        works: Any = [
            SimpleNamespace(active=twin, tree=tree if tree.tokens else None, first_sample=-1, node_slots=None)
            for twin, tree in zip(twins, trees, strict=True)
            if twin.live
        ]
        expected = lay_out(
            works, size=size, per_chunk=per_chunk, block_size=BLOCK_SIZE, first_scratch_slot=SCRATCH,
            spare_seq_slot=SPARE_SEQ_SLOT, spare_slot=SPARE_SLOT,
        )  # fmt: skip
        max_moves = len(due) + int(dice.integers(0, 3))
        if due:
            inputs = np.empty(expected.size + 2 * (len(due) - 1), np.int32)
            assert not burst.lay_out(tokens, parents, counts, tables, size, per_chunk, len(due) - 1, inputs)
        inputs = np.empty(expected.size + 2 * max_moves, np.int32)
        assert burst.lay_out(tokens, parents, counts, tables, size, per_chunk, max_moves, inputs)
        assert (inputs[: expected.size].reshape(expected.shape) == expected).all()
        moves = inputs[expected.size :].reshape(2, max_moves).T.tolist()
        assert moves == [list(move) for move in due] + [[-1, -1]] * (max_moves - len(due))

        sampled = dice.choice(NUMBERS, (size * per_chunk, 4))
        sampled[:, 0].view(np.int32)[...] = dice.integers(0, VOCABULARY, len(sampled))
        fresh = np.empty(len(twins) + int(counts.sum()), np.int32)
        burst.settle(sampled, tables, NEAR_TIE, fresh, offsets)
        due, before = [], {id(twin): len(twin.tokens) for twin in twins}
        for work in works:
            rows = sampled[work.first_sample : work.first_sample + per_chunk]
            due += settle(work.active, work.tree, work.node_slots, rows, tally)
            num_near_ties += int((rows[tally[-1][1].rows, 3] < NEAR_TIE).sum())
        for row, twin in enumerate(twins):
            assert fresh[offsets[row] : offsets[row + 1]].tolist() == twin.tokens[before[id(twin)] :]

    assert burst.take_moves() == ([source for source, _ in due], [target for _, target in due])
    assert burst.take_moves() == ([], [])
    assert burst.num_near_ties == num_near_ties
    for row, twin in enumerate(twins):
        result = burst[row]
        assert list(zip(result.tokens, result.logprobs, result.raw_logprobs, strict=True)) == twin.generated
        assert (result.stopped, result.num_drafted, result.num_accepted) == (
            twin.stopped, twin.num_drafted, twin.num_accepted,
        )  # fmt: skip
    assert list(burst.tried)[:MAX_NODES] == [sum(allowed > at for allowed, _ in tally) for at in range(MAX_NODES)]
    assert list(burst.taken)[:MAX_NODES] == [sum(at in way.nodes for _, way in tally) for at in range(MAX_NODES)]


def a_burst(remaining: int = 5) -> DraftBurst:
    burst = DraftBurst(block_size=4, first_scratch_slot=SCRATCH, spare_seq_slot=9, spare_slot=7)
    burst.add(seq_slot=0, root=3, token=1, remaining=remaining, stop_ids=[])
    return burst


@pytest.mark.parametrize(
    ("parents", "count", "inputs", "message"),
    [
        ([[-1, 1]], 2, 6 * 3, "follows its parent"),
        ([[-1, 0]], 3, 6 * 3, "more nodes"),
        ([[-1, 0]], 2, 6 * 3 - 1, "six fields"),
    ],
)
def test_a_table_that_cannot_be_laid_out_is_refused(
    parents: list[list[int]], count: int, inputs: int, message: str
) -> None:
    tables = np.zeros((1, 8), np.int32)
    with pytest.raises(ValueError, match=message):
        a_burst().lay_out(
            np.zeros((1, 2), np.int32), np.array(parents, np.int32), np.array([count], np.int32), tables, 1, 3, 0,
            np.empty(inputs, np.int32),
        )  # fmt: skip


def test_a_tree_past_its_chunks_limit_is_refused() -> None:
    with pytest.raises(ValueError, match="limit"):
        a_burst(remaining=2).lay_out(
            np.zeros((1, 2), np.int32), np.array([[-1, 0]], np.int32), np.array([2], np.int32),
            np.zeros((1, 8), np.int32), 1, 3, 0, np.empty(18, np.int32),
        )  # fmt: skip
