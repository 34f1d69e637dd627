# SPDX-License-Identifier: Apache-2.0
"""The block table against its own definition, under random use."""

from __future__ import annotations

import random

import pytest

pytest.importorskip("torch")

from seer.engine.local.blocks import BlockTable


def test_a_released_block_is_found_until_its_room_is_needed() -> None:
    table = BlockTable(2)
    first = table.take(1)
    table.seal(first[0], b"a")
    table.release(first)
    assert table.find([b"a"]) == first
    table.hold(table.take(2))
    assert table.find([b"a"]) == []


def test_the_least_recently_used_content_goes_first() -> None:
    table = BlockTable(3)
    for key in (b"a", b"b", b"c"):
        taken = table.take(1)
        table.seal(taken[0], key)
        table.release(taken)
    again = table.find([b"a"])
    table.hold(again)
    table.release(again)
    table.take(1)
    assert (table.find([b"b"]), bool(table.find([b"a"])), bool(table.find([b"c"]))) == ([], True, True)


def test_a_second_block_of_equal_content_is_not_registered() -> None:
    table = BlockTable(2)
    a, b = table.take(2)
    table.seal(a, b"k")
    table.seal(b, b"k")
    assert table.find([b"k"]) == [a]
    table.release([b])
    assert table.num_cached == 0


def test_new_weights_make_everything_unreachable() -> None:
    table = BlockTable(2)
    a, b = table.take(2)
    table.seal(a, b"a")
    table.seal(b, b"b")
    table.release([b])
    table.forget_all()
    assert table.find([b"a"]) == table.find([b"b"]) == []
    table.check_integrity([[a]])


def test_taking_more_than_there_is_is_a_programming_error() -> None:
    with pytest.raises(AssertionError, match="3 blocks asked, 2 available"):
        BlockTable(2).take(3)


def test_random_use_keeps_every_equation() -> None:
    for seed in range(30):
        dice = random.Random(seed)
        table, holders = BlockTable(12), []
        for _ in range(200):
            action = dice.random()
            if action < 0.4 and table.num_available >= 3:
                keys = [bytes([dice.randrange(6), depth]) for depth in range(3)]
                found = table.find(keys)
                table.hold(found)
                fresh = table.take(min(3 - len(found), table.num_available))
                for offset, block in enumerate(fresh):
                    table.seal(block, keys[len(found) + offset])
                holders.append(found + fresh)
            elif action < 0.95 and holders:
                table.release(holders.pop(dice.randrange(len(holders))))
            elif action >= 0.98:
                table.forget_all()
            table.check_integrity(holders)


def test_the_integrity_check_notices_a_lost_reference() -> None:
    table = BlockTable(3)
    held = table.take(2)
    with pytest.raises(AssertionError, match="references"):
        table.check_integrity([held[:1]])
