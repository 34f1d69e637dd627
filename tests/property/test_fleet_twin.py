# SPDX-License-Identifier: Apache-2.0
"""The fleet's sorted orders against a brute-force twin that looks at every instance for every call."""

from __future__ import annotations

from random import Random

from hypothesis import given, settings
from hypothesis import strategies as st

from builders import a_group, limits, requests_of
from seer.fleet import Fleet


def with_room(fleet: Fleet, num_blocks: int, num_tokens: int) -> list[int]:
    return [i for i in range(len(fleet)) if fleet.has_room(i, num_blocks, num_tokens)]


def least_loaded(fleet: Fleet, num_blocks: int, num_tokens: int) -> int | None:
    return min(with_room(fleet, num_blocks, num_tokens), key=lambda i: (fleet.in_flight[i], i), default=None)


def candidates(fleet: Fleet, num_blocks: int, each_end: int, num_tokens: int) -> list[int]:
    fits = [i for i in range(len(fleet)) if fleet.alive(i) and fleet.free_blocks[i] >= num_blocks]
    fits = [i for i in fits if num_tokens <= fleet.limits[i].max_model_len]
    fits.sort(key=lambda i: (fleet.free_blocks[i], i))
    chosen = fits if len(fits) <= 2 * each_end else fits[:each_end] + fits[-each_end:]
    return [i for i in chosen if fleet.in_flight[i] < fleet.limits[i].max_num_seqs]


@settings(max_examples=100)
@given(
    rooms=st.lists(st.tuples(st.integers(1, 20), st.integers(1, 6), st.integers(50, 60)), min_size=1, max_size=12),
    seed=st.integers(0, 2**32),
)
def test_the_orders_of_a_fleet_are_those_of_a_look_at_every_instance(
    rooms: list[tuple[int, int, int]], seed: int
) -> None:
    new = [limits(blocks, max_num_seqs=seqs, max_model_len=longest) for blocks, seqs, longest in rooms]
    kinds = list(new)
    fleet = Fleet(new[:1])
    new = new[1:]
    random = Random(seed)  # long programs: hypothesis alone writes short ones, in which no instance fills up
    waiting = requests_of(a_group(0, 60))
    running = []
    for _ in range(150):
        if new and random.random() < 0.3:
            assert fleet.add(new.pop()) == len(fleet) - 1
        longest = max(one.max_model_len for one in fleet.limits)  # longer requests are not admitted
        num_blocks, num_tokens = random.randrange(12), random.randrange(48, longest + 1)
        assert fleet.least_loaded(num_blocks, num_tokens) == least_loaded(fleet, num_blocks, num_tokens)
        assert fleet.candidates(num_blocks, 2, num_tokens) == candidates(fleet, num_blocks, 2, num_tokens)
        operation = random.choice(["promise"] * 4 + ["give back", "lose", "retire"])
        instance = random.randrange(len(fleet))
        # Not only to the least loaded: the twins are to agree about any fleet, however uneven.
        if operation == "promise" and waiting and fleet.has_room(instance, num_blocks):
            request = waiting.pop()
            fleet.promise(request, instance, num_blocks)
            running.append(request)
        elif operation == "give back" and running:
            request = running.pop(random.randrange(len(running)))
            fleet.give_back(request)
            waiting.append(request)
        elif operation == "lose" and fleet.alive(instance):
            lost = set(fleet.lose(instance))
            waiting += [request for request in running if request.id in lost]
            running = [request for request in running if request.id not in lost]
        elif operation == "retire":  # what runs there stays promised
            fleet.retire(instance)
        elif operation == "lose":
            fleet.join(instance, random.choice(kinds))  # as after a restart on another node
        fleet.check()
