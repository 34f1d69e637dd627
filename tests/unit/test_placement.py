"""Promises of memory, and where a chunk goes."""

import pytest

from builders import a_fleet, a_group, requests_of
from seer.buffer import Request
from seer.errors import ConfigError
from seer.placement import Fleet, Place, PlacementConfig, place

CONFIG = PlacementConfig(imbalance_threshold=2, pull_margin_tokens=100)


def a_request(*, generated: int = 0, last: int | None = None, group: int = 0) -> Request:
    request = requests_of(a_group(group, 1, prompt=64, max_tokens=5000))[0]
    request.num_generated, request.last_instance = generated, last
    return request


def load(fleet: Fleet, instance: int, requests: int, blocks: int = 1) -> None:
    base = 1000 * (instance + 1)
    for request in requests_of(a_group(instance + 100, requests)):
        request.id += base
        fleet.promise(request, instance, blocks)


def test_a_fleet_needs_an_instance() -> None:
    with pytest.raises(ConfigError):
        Fleet([])


def test_memory_is_counted_at_the_end_of_the_chunk() -> None:
    fleet = a_fleet(1, blocks=3)
    assert place(a_request(), 128, fleet, CONFIG) == Place(0, load_kv=False)  # 64 + 128 tokens: 3 blocks
    assert place(a_request(), 129, fleet, CONFIG) is None


def test_more_than_is_free_is_never_promised() -> None:
    fleet = a_fleet(1, blocks=3)
    request = a_request()
    with pytest.raises(AssertionError, match="3 free blocks, 4 promised"):
        fleet.promise(request, 0, 4)
    fleet.promise(request, 0, 3)
    assert fleet.free_blocks(0) == 0
    with pytest.raises(AssertionError, match="holds a promise"):
        fleet.promise(request, 0, 0)
    fleet.give_back(request)
    with pytest.raises(KeyError):
        fleet.give_back(request)
    fleet.check()


def test_a_request_stays_where_its_kv_is_while_the_load_is_balanced() -> None:
    fleet = a_fleet(2)
    load(fleet, 1, 2)
    assert fleet.spread == 2
    assert place(a_request(generated=500, last=1), 64, fleet, CONFIG) == Place(1, load_kv=False)


def test_a_request_moves_with_its_kv_once_the_load_is_uneven() -> None:
    fleet = a_fleet(2)
    load(fleet, 1, 3)
    assert place(a_request(generated=500, last=1), 64, fleet, CONFIG) == Place(0, load_kv=True)


def test_a_small_gap_is_recomputed_rather_than_pulled() -> None:
    fleet = a_fleet(2)
    load(fleet, 1, 3)
    assert place(a_request(generated=36, last=1), 64, fleet, CONFIG) == Place(0, load_kv=False)  # 100 tokens
    assert place(a_request(generated=37, last=1), 64, fleet, CONFIG) == Place(0, load_kv=True)


def test_a_request_moves_when_its_home_is_full_or_gone() -> None:
    fleet = a_fleet(2, blocks=10)
    load(fleet, 1, 1, blocks=9)
    assert place(a_request(generated=500, last=1), 64, fleet, CONFIG) == Place(0, load_kv=True)
    fleet.lose(0)
    assert place(a_request(generated=500, last=1), 64, fleet, CONFIG) is None


def test_a_first_chunk_joins_a_sibling_that_has_the_prompt() -> None:
    fleet = a_fleet(3)
    probe, sibling = requests_of(a_group(0, 2, prompt=64))
    fleet.promise(probe, 2, 1)
    assert place(sibling, 64, fleet, CONFIG) == Place(2, load_kv=False)


def test_ties_go_to_the_lowest_id() -> None:
    fleet = a_fleet(3)
    assert fleet.least_loaded() == 0
    load(fleet, 0, 1)
    assert fleet.least_loaded() == 1


def test_an_instance_with_all_slots_taken_is_no_candidate() -> None:
    fleet = a_fleet(1, max_running=2)
    load(fleet, 0, 2)
    assert place(a_request(), 64, fleet, CONFIG) is None


def test_losing_an_instance_withdraws_its_promises_and_joining_offers_it_again() -> None:
    fleet = a_fleet(2)
    load(fleet, 0, 3)
    assert len(fleet.lose(0)) == 3
    fleet.check()
    assert (fleet.num_alive, fleet.alive(0), fleet.least_loaded()) == (1, False, 1)
    fleet.join(0)
    fleet.check()
    assert fleet.least_loaded() == 0
    with pytest.raises(AssertionError, match="already"):
        fleet.join(0)


def test_a_fleet_with_nobody_left_has_no_place() -> None:
    fleet = a_fleet(1)
    fleet.lose(0)
    assert (fleet.spread, fleet.free_tokens, fleet.least_loaded(), fleet.least_loaded(1)) == (
        0,
        0,
        None,
        None,
    )
    assert fleet.candidates(1, 8) == []
    assert place(a_request(), 64, fleet, CONFIG) is None


def test_candidates_have_room_and_are_the_fullest_and_the_emptiest() -> None:
    fleet = a_fleet(6, blocks=10)
    for instance, blocks in enumerate((9, 5, 4, 3, 2, 0)):
        if blocks:
            load(fleet, instance, 1, blocks=blocks)
    assert fleet.candidates(2, each_end=8) == [1, 2, 3, 4, 5]  # fullest first
    assert fleet.candidates(2, each_end=1) == [1, 5]
    assert fleet.candidates(11, each_end=8) == []


def test_free_tokens_are_those_of_the_living() -> None:
    fleet = a_fleet(2, blocks=10)
    load(fleet, 0, 1, blocks=4)
    assert fleet.free_tokens == 16 * 64
    fleet.lose(0)
    assert fleet.free_tokens == 10 * 64
    fleet.join(0)
    assert fleet.free_tokens == 20 * 64


def test_check_finds_a_miscount() -> None:
    fleet = a_fleet()
    fleet._free[0] -= 1
    with pytest.raises(AssertionError, match="miscounts"):
        fleet.check()
