# SPDX-License-Identifier: Apache-2.0
"""Promises of memory, and where a chunk goes."""

from dataclasses import replace

import pytest

from builders import a_fleet, a_group, limits, requests_of
from seer.buffer import Request
from seer.errors import ConfigError
from seer.fleet import Fleet
from seer.placement import Place, PlacementConfig, place
from seer.transfer import MoveCost, PrefillCost, TransferCosts, TransferEstimate

# A transfer takes 1.5 ms, a token 10 us to compute and nothing to move: moving pays from 151 tokens on.
COSTS = TransferCosts(
    move=MoveCost(latency_s=1.5e-3, bandwidth_bytes_s=1e15), prefill=PrefillCost(fixed_s=0.0, per_token_s=1e-5)
)
CONFIG = PlacementConfig(imbalance_threshold=2, transfer=TransferEstimate(COSTS))


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
    assert fleet.free_blocks[0] == 0
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
    placed = place(a_request(generated=500, last=1), 64, fleet, CONFIG)
    assert placed == Place(1, load_kv=True)  # should its KV have been dropped there meanwhile


def test_a_request_moves_with_its_kv_once_the_load_is_uneven() -> None:
    fleet = a_fleet(2)
    load(fleet, 1, 3)
    assert place(a_request(generated=500, last=1), 64, fleet, CONFIG) == Place(0, load_kv=True)


@pytest.mark.parametrize(("last", "expected"), [(0, 0), (1, 0)])
def test_kv_is_pulled_only_where_that_is_sooner_than_computing_it(last: int, expected: int) -> None:
    fleet = a_fleet(2)
    load(fleet, 1, 3)  # uneven: everything goes to instance 0, home or not
    assert place(a_request(generated=127, last=last), 64, fleet, CONFIG) == Place(expected, load_kv=False)
    assert place(a_request(generated=128, last=last), 64, fleet, CONFIG) == Place(expected, load_kv=True)  # 3 blocks


def test_the_papers_placement_pulls_a_gap_of_more_than_512_tokens_whatever_it_costs() -> None:
    fleet = a_fleet(2)
    free_compute = TransferCosts(move=COSTS.move, prefill=PrefillCost(fixed_s=0.0, per_token_s=0.0))
    config = PlacementConfig(imbalance_threshold=2, transfer=TransferEstimate(free_compute)).as_in_the_paper()
    assert (config.imbalance_threshold, config.pull_margin_tokens) == (32, 512)
    prompt_tokens = a_request().num_tokens
    at_margin, above = (a_request(generated=512 - prompt_tokens + more, last=1) for more in (0, 1))
    assert place(at_margin, 64, fleet, config) == Place(1, load_kv=False)
    assert place(above, 64, fleet, config) == Place(1, load_kv=True)
    assert place(above, 64, fleet, replace(config, transfer=None)) == Place(1, load_kv=False)


def test_a_prompt_that_is_there_need_not_be_pulled() -> None:
    fleet = a_fleet(2)
    load(fleet, 1, 5)
    request, sibling = a_request(generated=140, last=1), a_request()
    sibling.id = 77
    assert place(request, 64, fleet, CONFIG) == Place(0, load_kv=True)
    fleet.promise(sibling, 0, 1)
    assert place(request, 64, fleet, CONFIG) == Place(0, load_kv=False)  # 140 tokens are lacking, not 204


def test_a_prompt_that_was_there_may_have_been_dropped_and_is_priced_as_lacking() -> None:
    fleet = a_fleet(1)
    request, sibling = a_request(generated=127, last=0), a_request()
    sibling.id = 77
    fleet.promise(sibling, 0, 1)
    assert place(request, 64, fleet, CONFIG) == Place(0, load_kv=False)
    fleet.give_back(sibling)
    fleet.check()
    request.num_generated = 128
    assert place(request, 64, fleet, CONFIG) == Place(0, load_kv=True)  # all 192 tokens, prompt included


def test_after_a_turn_the_block_that_is_not_full_counts_as_pooled() -> None:
    fleet = a_fleet(1)  # with blocks of 64 tokens
    costs = replace(COSTS, move=replace(COSTS.move, latency_s=1e-6))
    config = replace(CONFIG, transfer=TransferEstimate(costs))
    for has_turns in (False, True):
        group = replace(a_group(0, 1, prompt=20), has_turns=has_turns, max_context_tokens=500)
        (request,) = requests_of(group)
        request.num_generated, request.last_instance = 10, 0
        assert place(request, 64, fleet, config) == Place(0, load_kv=has_turns)


def test_without_a_pool_or_before_the_first_token_nothing_is_pulled() -> None:
    fleet = a_fleet(2)
    load(fleet, 1, 3)
    without = PlacementConfig(imbalance_threshold=2, transfer=None)
    assert place(a_request(generated=5000, last=1), 64, fleet, without) == Place(0, load_kv=False)
    assert place(a_request(), 64, fleet, CONFIG) == Place(0, load_kv=False)


def test_measured_costs_change_the_decision() -> None:
    fleet = a_fleet(2)
    load(fleet, 1, 3)
    estimate = TransferEstimate(COSTS)
    config = PlacementConfig(imbalance_threshold=2, transfer=estimate)
    for _ in range(8):
        estimate.saw_move(1_000_000, 10.0)  # a pool that has become slow
    estimate.saw_prefill(1000, COSTS.prefill.seconds(0, 1000))
    assert place(a_request(generated=2000, last=1), 64, fleet, config) == Place(0, load_kv=False)
    estimate.saw_prefill(1000, 5000.0)  # and compute that is slower still
    assert place(a_request(generated=2000, last=1), 64, fleet, config) == Place(0, load_kv=True)


def test_after_a_loss_what_the_pool_holds_is_pulled() -> None:
    fleet = a_fleet(2)
    fleet.lose(1)
    assert place(a_request(generated=500, last=None), 64, fleet, CONFIG) == Place(0, load_kv=True)


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
    fleet = a_fleet(1, max_num_seqs=2)
    load(fleet, 0, 2)
    assert place(a_request(), 64, fleet, CONFIG) is None


def test_losing_an_instance_withdraws_its_promises_and_joining_offers_it_again() -> None:
    fleet = a_fleet(2)
    load(fleet, 0, 3)
    assert len(fleet.lose(0)) == 3
    fleet.check()
    assert (fleet.num_alive, fleet.alive(0), fleet.least_loaded()) == (1, False, 1)
    fleet.join(0, limits())
    fleet.check()
    assert fleet.least_loaded() == 0
    with pytest.raises(AssertionError, match="already"):
        fleet.join(0, limits())


def test_an_instance_that_comes_back_elsewhere_has_the_limits_of_there() -> None:
    fleet = a_fleet(2, blocks=100)
    load(fleet, 0, 3)
    fleet.lose(0)
    assert fleet.longest_request_tokens == 6400
    fleet.join(0, limits(10, max_num_seqs=5))
    fleet.check()
    assert (fleet.is_uniform, fleet.kv_tokens, fleet.max_num_seqs) == (False, 110 * 64, 1005)
    assert fleet.candidates(11, 8) == [1]
    fleet.lose(1)
    fleet.join(1, limits(10, max_num_seqs=5))
    fleet.check()
    assert (fleet.is_uniform, fleet.longest_request_tokens, fleet.candidates(11, 8)) == (True, 640, [])
    fleet.lose(1)
    with pytest.raises(ConfigError, match="blocks of 64 and of 32 tokens"):
        fleet.join(1, limits(10, block_size=32))
    fleet.check()


def test_only_instances_that_may_come_back_count_for_the_longest_request() -> None:
    fleet = Fleet([limits(100), limits(10)])
    fleet.lose(0)
    assert fleet.longest_request_tokens == 6400
    fleet.retire(0)
    assert fleet.longest_request_tokens == 640
    fleet.check()


def test_a_fleet_with_no_instance_left_has_no_place() -> None:
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
    fleet.join(0, limits(10))
    assert fleet.free_tokens == 20 * 64


def test_check_finds_a_miscount() -> None:
    fleet = a_fleet()
    fleet._free[0] -= 1
    with pytest.raises(AssertionError, match="miscounts"):
        fleet.check()
