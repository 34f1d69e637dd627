# SPDX-License-Identifier: Apache-2.0
"""Nodes that share a network in the simulator."""

from __future__ import annotations

import asyncio
import functools

import pytest

from builders import a_cost, a_group, a_workload, requests_of
from seer.buffer import chunk_of
from seer.errors import ConfigError
from seer.sim import virtual_time
from seer.sim.cluster import simulate
from seer.sim.network import ClusterNetwork, NetworkShape
from seer.sim.shared_link import SharedLink
from seer.sim.workloads import instances_on, paper_workload

WORKLOAD = a_workload([[300, 900, 150, 700]] * 12, instances=8, kv_tokens=2000, chunk_tokens=128)


def ends_of(bandwidth_bytes_s: float, transfers: list[tuple[float, float]]) -> list[float]:
    """When transfers end that begin at these times with these bytes."""
    ends = [0.0] * len(transfers)

    async def scenario() -> None:
        loop, link, left = asyncio.get_running_loop(), SharedLink(bandwidth_bytes_s), asyncio.Semaphore(0)

        def ended(number: int) -> None:
            ends[number] = loop.time()
            left.release()

        for number, (begins_s, num_bytes) in enumerate(transfers):
            loop.call_later(begins_s, link.send, num_bytes, functools.partial(ended, number))
        for _ in transfers:
            await left.acquire()
        assert link.num_bytes == sum(num_bytes for _, num_bytes in transfers)

    virtual_time.run(scenario())
    return ends


def test_a_transfer_alone_has_the_whole_link() -> None:
    assert ends_of(100.0, [(0.0, 500.0)]) == pytest.approx([5.0])


def test_transfers_under_way_share_the_link_equally() -> None:
    assert ends_of(100.0, [(0.0, 500.0), (0.0, 500.0)]) == pytest.approx([10.0, 10.0], rel=1e-2)
    # The second begins when 200 bytes are left of the first, takes half the link, and has it alone at the end.
    assert ends_of(100.0, [(0.0, 500.0), (3.0, 500.0)]) == pytest.approx([7.0, 10.0], rel=1e-2)


def test_bytes_that_came_up_over_time_have_used_idle_time_and_each_of_it_once() -> None:
    gone: list[float] = []

    async def scenario() -> None:
        link, ended = SharedLink(100.0), asyncio.Event()
        await asyncio.sleep(4.0)
        gone.append(link.send(250.0, lambda: None, since_s=1.0))  # 300 could have gone since then
        gone.append(link.send(250.0, ended.set, since_s=0.0))  # of the 400 in all, 150 are left
        gone.append(link.send(0.0, lambda: None))
        began_s = asyncio.get_running_loop().time()
        await ended.wait()
        assert asyncio.get_running_loop().time() - began_s == pytest.approx(1.0, rel=0.05)
        assert link.busy_s == pytest.approx(5.0, rel=0.05)

    virtual_time.run(scenario())
    assert gone == pytest.approx([250.0, 150.0, 0.0])


def test_a_load_comes_from_the_own_node_where_it_can_and_from_others_once_it_was_saved() -> None:
    cost = a_cost()
    rate = cost.model.kv_bytes_per_token  # one token a second over the card
    shape = NetworkShape(nic_bytes_s=rate, near_bytes_s=10 * rate, gpus_per_node=2)
    arrived: dict[str, float] = {}

    async def scenario() -> None:
        loop, network = asyncio.get_running_loop(), ClusterNetwork(shape, cost, 4)
        chunk = chunk_of(requests_of(a_group())[1], 0, 1)
        network.save(1, 0, 20, 20, since_s=loop.time())
        done = asyncio.Semaphore(0)

        def note(name: str) -> None:
            arrived[name] = loop.time()
            done.release()

        assert network.load(chunk, 1, 0, 20, lambda: note("near")) == 20
        assert network.load(chunk, 2, 0, 20, lambda: note("nothing")) == 0, "it is still being saved"
        await asyncio.sleep(25.0)
        assert network.load(chunk, 2, 0, 20, lambda: note("far")) == 20
        for _ in range(3):
            await done.acquire()
        use = network.use(loop.time())
        assert (use.near_bytes, use.far_bytes, use.saved_bytes) == (20 * rate, 20 * rate, 20 * rate)

    virtual_time.run(scenario())
    assert arrived == pytest.approx({"nothing": 0.0, "near": 2.0, "far": 45.0}, rel=1e-2)


def test_kv_that_was_saved_as_it_was_made_comes_at_once_and_the_rest_does_not() -> None:
    cost = a_cost()
    shape = NetworkShape(nic_bytes_s=cost.model.kv_bytes_per_token, gpus_per_node=1)  # one token a second

    async def scenario() -> None:
        network, request = ClusterNetwork(shape, cost, 2), requests_of(a_group())[1]
        await asyncio.sleep(15.5)
        network.save(1, 0, 30, 20, since_s=0.0)  # 10 were there before, 15 could go as they were made
        assert network.load(chunk_of(request, 0, 1), 1, 4, 26, lambda: None) == 21

    virtual_time.run(scenario())


def makespan_s(nic_bytes_s: float | None, *, near: bool = True) -> float:
    shape = None if nic_bytes_s is None else NetworkShape(nic_bytes_s=nic_bytes_s, gpus_per_node=4, has_near_tier=near)
    result = simulate(WORKLOAD, "seer", speculation="off", network=shape)
    assert result.summary.num_tokens == WORKLOAD.num_tokens
    return result.summary.makespan_s


def test_a_slow_network_makes_the_rollout_longer_and_a_fast_one_does_not() -> None:
    free = makespan_s(None)
    assert makespan_s(1e12) == pytest.approx(free, rel=0.05)
    assert makespan_s(1e2) >= 0.95 * free


def test_equal_runs_are_equal() -> None:
    assert makespan_s(1e5) == makespan_s(1e5)


def test_moves_inside_a_node_do_not_use_the_card() -> None:
    uses = {}
    for near in (True, False):
        shape = NetworkShape(nic_bytes_s=1e9, gpus_per_node=4, has_near_tier=near)
        result = simulate(WORKLOAD, "seer", speculation="off", network=shape)
        assert result.network is not None
        uses[near] = result.network
    assert uses[True].near_bytes > 0
    assert uses[False].near_bytes == 0 < uses[False].far_bytes
    assert uses[True].far_bytes <= uses[False].far_bytes


def test_nodes_are_filled_and_the_papers_workloads_grow_with_them() -> None:
    small, large = (paper_workload("qwen2-vl-72b", num_nodes=nodes) for nodes in (1, 2))
    assert (small.num_instances, large.num_instances) == (1, 2)
    assert large.num_requests == pytest.approx(2 * small.num_requests, rel=0.02)
    assert instances_on(4, 32) == 1
    with pytest.raises(ConfigError, match="hold no instance"):
        instances_on(3, 32)
