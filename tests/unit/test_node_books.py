# SPDX-License-Identifier: Apache-2.0
"""Several nodes: what each holds of a request, what loading it costs, and where Seer's scheduler places it."""

from __future__ import annotations

from builders import a_group, limits, requests_of
from seer.buffer import Request
from seer.fleet import Fleet
from seer.node_books import NodeBooks
from seer.placement import PlacementConfig, loads_kv
from seer.scheduling.longest_first import LongestRemainingFirst
from seer.scheduling.seer import EarliestFinishPlacement
from seer.transfer import MoveCost, PrefillCost, TransferCosts, TransferEstimate

NODES = ["a", "a", "b", "b"]


def a_fleet() -> Fleet:
    return Fleet([limits(100)] * 4, NODES)


def a_request(generated: int = 0, last: int | None = None) -> Request:
    request = requests_of(a_group(0, 1, prompt=64, max_tokens=5000))[0]
    request.num_generated, request.last_instance = generated, last
    return request


def run_on(fleet: Fleet, request: Request, instance: int, generated: int) -> None:
    fleet.promise(request, instance, 10)
    request.num_generated, request.last_instance = generated, instance
    fleet.give_back(request)


def test_a_node_holds_what_a_request_had_when_it_last_left_it() -> None:
    fleet, request = a_fleet(), a_request()
    run_on(fleet, request, 0, 100)
    run_on(fleet, request, 2, 250)
    assert [fleet.near_tokens(request, i) for i in range(4)] == [164, 164, 314, 314]
    fleet.nodes.forget(request.id)
    assert [fleet.near_tokens(request, i) for i in range(4)] == [0] * 4


def test_on_one_node_nothing_is_kept() -> None:
    books = NodeBooks()
    for instance in range(2):
        books.place(instance, None)
    books.left(7, 0, 100)
    assert (books.are_many, books.near_tokens(7, 1)) == (False, 0)


def test_an_instance_that_returns_on_another_node_is_counted_there() -> None:
    books = NodeBooks()
    for instance, node in enumerate(NODES):
        books.place(instance, node)
    books.left(7, 1, 100)
    books.place(1, "b")
    assert (list(books.members(1)), list(books.members(0))) == ([1, 2, 3], [0])
    assert (books.near_tokens(7, 1), books.near_tokens(7, 0)) == (0, 100)
    books.place(0, "b")
    assert not books.are_many


def test_kv_of_the_own_node_is_loaded_where_that_of_another_would_be_computed() -> None:
    costs = TransferCosts(
        move=MoveCost(latency_s=1.0, bandwidth_bytes_s=1e12),
        near_move=MoveCost(latency_s=0.0, bandwidth_bytes_s=1e12),
        prefill=PrefillCost(fixed_s=0.0, per_token_s=1e-4),
    )
    config = PlacementConfig(transfer=TransferEstimate(costs))
    fleet, request = a_fleet(), a_request()
    run_on(fleet, request, 0, 1000)
    assert [loads_kv(request, i, fleet, config) for i in (1, 2)] == [True, False]


def test_of_equal_instances_the_one_on_the_node_that_holds_the_kv_is_chosen() -> None:
    fleet, request = a_fleet(), a_request()
    run_on(fleet, request, 3, 1000)
    others = requests_of(a_group(9, 4, prompt=10))
    for number, other in enumerate(others):
        other.id += 100 + number
    fleet.promise(others[0], 3, 100)  # no room where it was
    scheduler = EarliestFinishPlacement(LongestRemainingFirst(lambda _: 100.0), lambda _: 100.0, max_chunk_tokens=64)
    placed = scheduler.place(request, 64, fleet)
    assert placed is not None
    assert placed.instance == 2, "0 and 1 are as empty, on the other node"


def test_moves_between_nodes_are_hoped_to_be_as_fast_as_those_inside_until_one_was_seen() -> None:
    estimate = TransferEstimate()
    estimate.saw_prefill(1000, 1.0)
    for size in (1000, 2000, 3000, 4000):
        estimate.saw_near_move(size, size / 1e6)
    near = estimate.costs.near_move
    assert near is not None
    assert estimate.costs.move == near
    for size in (1000, 2000, 3000, 4000):
        estimate.saw_move(size, size / 1e3)
    assert estimate.costs.near_move == near
    assert estimate.costs.move.bandwidth_bytes_s < 1e-2 * near.bandwidth_bytes_s
