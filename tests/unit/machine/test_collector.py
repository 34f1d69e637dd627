# SPDX-License-Identifier: Apache-2.0
"""The collector looks more seldom while a rollout runs, and still finds what rollouts leave behind."""

import gc

import pytest

from seer.machine.collector import SELDOM, collected_seldom


class Loop:
    """Garbage that only the collector finds."""

    num_alive = 0

    def __init__(self) -> None:
        self.me = self
        Loop.num_alive += 1

    def __del__(self) -> None:
        Loop.num_alive -= 1


@pytest.fixture
def python_thresholds() -> tuple[int, int, int]:
    """Those of Python, whatever a test before this one set."""
    gc.set_threshold(700, 10, 10)
    return gc.get_threshold()


@pytest.mark.usefixtures("python_thresholds")
def test_what_many_short_rollouts_leave_is_collected() -> None:
    gc.collect()
    for _ in range(400):
        with collected_seldom():
            for _ in range(500):  # fewer than Python's threshold: nothing is collected in a block
                Loop()
    assert Loop.num_alive <= SELDOM[0], "of 200,000"
    gc.collect()


def test_an_error_gives_the_thresholds_back(python_thresholds: tuple[int, int, int]) -> None:
    with pytest.raises(ValueError, match="broken"), collected_seldom():
        raise ValueError("broken")
    assert gc.get_threshold() == python_thresholds


def test_collections_are_seldom_while_any_block_is_open(python_thresholds: tuple[int, int, int]) -> None:
    first, second = collected_seldom(), collected_seldom()
    with first:
        assert gc.get_threshold() == SELDOM
        second.__enter__()
    assert gc.get_threshold() == SELDOM
    second.__exit__(None, None, None)
    assert gc.get_threshold() == python_thresholds


def test_thresholds_that_are_higher_or_off_are_kept() -> None:
    before = gc.get_threshold()
    try:
        for others, expected in (((50_000, 5, 500), (50_000, 20, 500)), ((0, 10, 10), (0, 10, 10))):
            gc.set_threshold(*others)
            with collected_seldom():
                assert gc.get_threshold() == expected
            assert gc.get_threshold() == others
    finally:
        gc.set_threshold(*before)
