# SPDX-License-Identifier: Apache-2.0
"""What a rollout holds is kept from the collector while it runs."""

import gc
import weakref
from collections.abc import Iterator

import pytest

from seer.machine.collector import SELDOM, heap_at_rest


class Loop:
    """Garbage that only the collector finds."""

    def __init__(self) -> None:
        self.me = self


@pytest.fixture(autouse=True)
def _thawed() -> Iterator[None]:
    gc.unfreeze()
    yield
    gc.unfreeze()


def test_what_was_there_is_left_alone_until_the_end() -> None:
    old = weakref.ref(Loop())
    with heap_at_rest():
        new = weakref.ref(Loop())
        gc.collect()
        assert old() is not None
        assert new() is None
    gc.collect()
    assert old() is None


def test_a_heap_that_others_froze_stays_frozen() -> None:
    gc.freeze()
    frozen = gc.get_freeze_count()
    with heap_at_rest():
        pass
    assert gc.get_freeze_count() == frozen


def test_an_error_thaws_the_heap_too() -> None:
    with pytest.raises(ValueError, match="broken"), heap_at_rest():
        raise ValueError("broken")
    assert gc.get_freeze_count() == 0


def test_collections_are_seldom_while_any_block_is_open() -> None:
    before = gc.get_threshold()
    first, second = heap_at_rest(), heap_at_rest()
    with first:
        assert gc.get_threshold() == SELDOM
        second.__enter__()
    assert gc.get_threshold() == SELDOM
    assert gc.get_freeze_count() > 0
    second.__exit__(None, None, None)
    assert gc.get_threshold() == before
    assert gc.get_freeze_count() == 0


def test_thresholds_that_are_higher_or_off_are_kept() -> None:
    before = gc.get_threshold()
    try:
        for others, expected in (((50_000, 5, 500), (50_000, 20, 500)), ((0, 10, 10), (0, 10, 10))):
            gc.set_threshold(*others)
            with heap_at_rest():
                assert gc.get_threshold() == expected
            assert gc.get_threshold() == others
    finally:
        gc.set_threshold(*before)
