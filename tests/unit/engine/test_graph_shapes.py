"""When a shape gets a graph of its own."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from seer.engine.local.graph_shapes import BATCH_SIZES, CAPTURE_ROWS, ROW_SIZES, GraphShapes, Shape

steps = st.lists(st.tuples(st.integers(1, 600), st.integers(1, 32), st.integers(1, 8)), min_size=1, max_size=60)


def test_the_first_step_has_its_own_graph_and_smaller_ones_share_it() -> None:
    shapes = GraphShapes()
    assert shapes.choose(8, 9) == Shape(8, 9)
    assert shapes.choose(3, 9) == Shape(8, 9)
    assert shapes.choose(8, 4) == Shape(8, 9)
    assert shapes.choose(9, 2) == Shape(12, 2), "nothing captured holds nine chunks"


def test_of_several_graphs_the_smallest_serves() -> None:
    shapes = GraphShapes()
    assert shapes.choose(4, 9) == Shape(4, 9)
    assert shapes.choose(64, 5) == Shape(64, 5)
    assert shapes.choose(2, 3) == Shape(4, 9)


def test_a_shape_is_captured_when_its_absence_has_cost_as_much() -> None:
    shapes = GraphShapes()
    shapes.choose(64, 9)
    wasted = 64 * 9 - 1 * 9
    chosen = [shapes.choose(1, 9) for _ in range(-(-CAPTURE_ROWS // wasted))]
    assert chosen == [Shape(64, 9)] * (len(chosen) - 1) + [Shape(1, 9)]
    assert shapes.choose(1, 9) == Shape(1, 9)


def test_a_burst_wastes_in_each_of_its_steps() -> None:
    shapes = GraphShapes()
    shapes.choose(8, 1)
    assert shapes.choose(4, 1, CAPTURE_ROWS // 4 - 1) == Shape(8, 1)
    assert shapes.choose(4, 1, 1) == Shape(4, 1)


@given(steps)
def test_every_step_fits_and_what_is_wasted_is_bounded(played: list[tuple[int, int, int]]) -> None:
    shapes, chosen = GraphShapes(), set()
    wasted: dict[Shape, int] = {}
    for num_chunks, rows, num_steps in played:
        own = Shape(
            min((s for s in BATCH_SIZES if s >= num_chunks), default=1024), min(s for s in ROW_SIZES if s >= rows)
        )
        shape = shapes.choose(num_chunks, rows, num_steps)
        assert shape.holds(own)
        assert shape == own or shape in chosen
        chosen.add(shape)
        if shape != own:
            wasted[own] = wasted.get(own, 0) + num_steps * (shape.num_rows - own.num_rows)
            assert own not in chosen
    assert all(rows < CAPTURE_ROWS for rows in wasted.values())
