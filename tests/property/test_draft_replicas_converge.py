# SPDX-License-Identifier: Apache-2.0
"""Replicas and server over a network that loses, doubles and reorders, and a server that forgets."""

from typing import Any

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from seer.drafting.index import DraftIndex
from seer.drafting.log import LogStore
from seer.drafting.replica import Replica
from seer.drafting.server import answer
from seer.drafting.wire import Reply, Request, decode, encode

GROUPS = (1, 2)
TTL_S = 1e6


class World:
    """Some instances, one server, and a network with a mind of its own."""

    def __init__(self, num_instances: int, rng: np.random.Generator) -> None:
        self.rng = rng
        self.now = 0.0
        self.incarnation = 1
        self.store = LogStore()
        self.indexes = [DraftIndex() for _ in range(num_instances)]
        self.replicas = [Replica(index, weights_version=3) for index in self.indexes]
        self.truth: dict[tuple[int, int], list[int]] = {}
        self.to_server: list[tuple[int, bytes]] = []
        self.to_instance: list[tuple[int, bytes]] = []
        for replica in self.replicas:
            for group in GROUPS:
                replica.register(group, TTL_S, self.now)

    def generate(self, instance: int, group: int, tokens: list[int]) -> None:
        """Request number = instance: each generates its own response of each group."""
        text = self.truth.setdefault((group, instance), [])
        text.extend(tokens)
        self.indexes[instance].append_one(group, instance, tokens)
        self.replicas[instance].note(group, instance, len(text), TTL_S, self.now)

    def send(self, instance: int) -> None:
        replica = self.replicas[instance]
        messages: list[Request] = list(replica.next_notices())
        if not replica.pushing and (push := replica.next_push()) is not None:
            messages.append(push)
        if not replica.fetching and (fetch := replica.next_fetch()) is not None:
            messages.append(fetch)
        self.to_server += [(instance, encode(message)) for message in messages]

    def restart_server(self) -> None:
        self.incarnation += 1
        self.store = LogStore()

    def deliver(self, *, faults: bool) -> None:
        for queue, handle in ((self.to_server, self._at_server), (self.to_instance, self._at_instance)):
            waiting, queue[:] = list(queue), []
            if faults:
                self.rng.shuffle(waiting)
            for item in waiting:
                fate = self.rng.integers(4) if faults else 1
                for _ in range(min(fate, 2)):  # lost, once, twice, twice
                    handle(*item)

    def _at_server(self, instance: int, frame: bytes) -> None:
        reply = answer(self.store, self.incarnation, decode(frame), self.now)
        self.to_instance.append((instance, encode(reply)))

    def _at_instance(self, instance: int, frame: bytes) -> None:
        reply = decode(frame)
        assert isinstance(reply, Reply)
        self.replicas[instance].receive(reply, self.now)

    def settle(self) -> None:
        """The network heals: unanswered messages time out, then everything gets through."""
        for queue in (self.to_server, self.to_instance):
            queue.clear()
        for replica in self.replicas:
            replica.lose()
        for _ in range(8):
            for instance in range(len(self.replicas)):
                self.send(instance)
            self.deliver(faults=False)

    def check(self) -> None:
        for (group, request), text in self.truth.items():
            for number, index in enumerate(self.indexes):
                assert index.tokens(group, request).tolist() == text, f"instance {number} differs"
                assert index.check_integrity(group) == ""
        lengths = {key: len(text) for key, text in self.truth.items() if text}
        assert self.store.stats().tokens == sum(lengths.values())
        for group in GROUPS:
            patterns = [text[i : i + 3] for (g, _), text in self.truth.items() if g == group for i in range(len(text))]
            for pattern in patterns:
                assert len({index.count(group, pattern) for index in self.indexes}) == 1


actions = st.lists(
    st.one_of(
        st.tuples(
            st.just("generate"),
            st.integers(0, 2),
            st.sampled_from(GROUPS),
            st.lists(st.integers(0, 3), min_size=1, max_size=70),
        ),
        st.tuples(st.just("send"), st.integers(0, 2)),
        st.tuples(st.just("deliver")),
        st.tuples(st.just("lose"), st.integers(0, 2)),
        st.tuples(st.just("restart")),
    ),
    max_size=40,
)


@given(actions, st.integers(0, 2**32 - 1))
@settings(max_examples=150, deadline=None)
def test_all_replicas_equal_the_truth_once_the_network_heals(steps: list[tuple[Any, ...]], seed: int) -> None:
    world = World(3, np.random.default_rng(seed))
    for step in steps:
        world.now += 0.01
        match step:
            case ("generate", instance, group, tokens):
                world.generate(instance, group, tokens)
            case ("send", instance):
                world.send(instance)
            case ("deliver",):
                world.deliver(faults=True)
            case ("lose", instance):
                world.replicas[instance].lose()
            case ("restart",):
                world.restart_server()
    world.settle()
    world.check()


def test_a_restarted_server_gets_the_logs_of_instances_that_are_gone_from_their_siblings() -> None:
    world = World(2, np.random.default_rng(0))
    world.generate(0, 1, list(range(200)))
    world.settle()
    world.restart_server()
    del world.replicas[0], world.indexes[0]  # the instance that generated it dies with the server
    for _ in range(4):
        world.send(0)
        world.deliver(faults=False)
    assert world.store.stats().tokens == 200
