# SPDX-License-Identifier: Apache-2.0
"""When a shape of steps gets a graph of its own."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from seer.engine.local.graph_shapes import (
    BATCH_SIZES,
    CAPTURE_COST_TOKENS,
    CHUNK_SIZES,
    EAGER_COST_TOKENS,
    MIXED_SIZES,
    GraphShapes,
    MixedShape,
    Shape,
)

steps = st.lists(st.tuples(st.integers(1, 600), st.integers(1, 32), st.integers(1, 8)), min_size=1, max_size=60)
mixed_steps = st.lists(st.tuples(st.integers(1, 600), st.integers(1, 64), st.booleans()), min_size=1, max_size=60)


def test_the_first_step_has_its_own_graph_and_smaller_ones_share_it() -> None:
    shapes = GraphShapes[Shape]()
    assert shapes.choose(Shape.of(8, 9)) == (8, 9)
    assert shapes.choose(Shape.of(3, 9)) == (8, 9)
    assert shapes.choose(Shape.of(8, 4)) == (8, 9)
    assert shapes.choose(Shape.of(9, 2)) == (12, 2), "nothing captured holds nine chunks"


def test_of_several_graphs_the_smallest_serves() -> None:
    shapes = GraphShapes[Shape]()
    assert shapes.choose(Shape(4, 9)) == (4, 9)
    assert shapes.choose(Shape(64, 5)) == (64, 5)
    assert shapes.choose(Shape(2, 3)) == (4, 9)


def test_a_shape_is_captured_when_its_absence_has_cost_as_much() -> None:
    shapes = GraphShapes[Shape]()
    shapes.choose(Shape(64, 9))
    wasted = 64 * 9 - 1 * 9
    chosen = [shapes.choose(Shape(1, 9)) for _ in range(-(-CAPTURE_COST_TOKENS // wasted))]
    assert chosen == [Shape(64, 9)] * (len(chosen) - 1) + [Shape(1, 9)]
    assert shapes.choose(Shape(1, 9)) == Shape(1, 9)


def test_a_burst_wastes_in_each_of_its_steps() -> None:
    shapes = GraphShapes[Shape]()
    shapes.choose(Shape(8, 1))
    assert shapes.choose(Shape(4, 1), CAPTURE_COST_TOKENS // 4 - 1) == (8, 1)
    assert shapes.choose(Shape(4, 1), 1) == (4, 1)


def test_a_mixed_step_runs_kernel_by_kernel_until_that_has_cost_a_capture() -> None:
    shapes = GraphShapes[MixedShape]()
    own = MixedShape.of(100, 3, has_trees=False)
    assert own == (128, 4, False)
    chosen = [shapes.choose_or_eager(own) for _ in range(CAPTURE_COST_TOKENS // EAGER_COST_TOKENS + 1)]
    assert chosen == [None] * (CAPTURE_COST_TOKENS // EAGER_COST_TOKENS - 1) + [own, own]
    smaller = MixedShape(64, 2, has_trees=False)
    assert shapes.choose_or_eager(smaller) == own, "a larger graph wastes less than the host would"
    assert shapes.choose_or_eager(MixedShape(64, 2, has_trees=True)) is None, "it has no room for trees"


def test_a_step_that_keeps_the_device_busy_needs_no_graph() -> None:
    assert MixedShape.of(MIXED_SIZES[-1] + 1, 1, has_trees=False) is None


@given(steps)
def test_every_step_fits_and_what_is_wasted_is_bounded(played: list[tuple[int, int, int]]) -> None:
    shapes, chosen = GraphShapes[Shape](), set()
    wasted: dict[Shape, int] = {}
    for num_chunks, rows, num_steps in played:
        own = Shape(
            min((s for s in BATCH_SIZES if s >= num_chunks), default=1024), min(s for s in CHUNK_SIZES if s >= rows)
        )
        assert Shape.of(num_chunks, rows) == own
        shape = shapes.choose(own, num_steps)
        assert shape.holds(own)
        assert shape == own or shape in chosen
        chosen.add(shape)
        if shape != own:
            wasted[own] = wasted.get(own, 0) + num_steps * (shape.num_batched_tokens - own.num_batched_tokens)
            assert own not in chosen
    assert all(rows < CAPTURE_COST_TOKENS for rows in wasted.values())


@given(mixed_steps)
def test_every_mixed_step_fits_and_what_is_wasted_is_bounded(played: list[tuple[int, int, bool]]) -> None:
    shapes, chosen = GraphShapes[MixedShape](), set()
    wasted: dict[MixedShape, int] = {}
    for num_batched_tokens, num_chunks, has_trees in played:
        own = MixedShape.of(num_batched_tokens, num_chunks, has_trees)
        if own is None:
            continue
        shape = shapes.choose_or_eager(own)
        if shape == own:
            chosen.add(shape)
            continue
        assert shape is None or (shape in chosen and shape.holds(own))
        wasted[own] = wasted.get(own, 0) + (
            EAGER_COST_TOKENS if shape is None else shape.num_batched_tokens - own.num_batched_tokens
        )
        assert own not in chosen
    assert all(rows < CAPTURE_COST_TOKENS for rows in wasted.values())
