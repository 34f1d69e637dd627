# SPDX-License-Identifier: Apache-2.0
"""Grouped drafts on the GPU: the kernels and the store against a Python twin, under Triton's interpreter."""

from __future__ import annotations

import os
import random
from dataclasses import dataclass, field

import numpy as np
import pytest

torch = pytest.importorskip("torch")
triton = pytest.importorskip("triton", reason="Triton is not installed")
if os.environ.get("TRITON_INTERPRET") != "1":
    pytest.skip("set TRITON_INTERPRET=1 to interpret the kernels", allow_module_level=True)

from seer.engine.vllm.gpu_drafts.kernels import accept_kernel
from seer.engine.vllm.gpu_drafts.siblings import Tail
from seer.engine.vllm.gpu_drafts.store import ORDERS, GroupStore, NewRow

NUM_ROWS, WIDTH, K, VOCABULARY = 6, 128, 4, 7
PROMPTS = {"a": [1, 2, 3, 1, 2], "b": [4, 5, 6], "c": [1, 2, 3, 4, 5, 6, 1]}


@dataclass
class Twin:
    """Contexts of each group and where they last continued, as a dictionary of lists."""

    last: dict[tuple[str, tuple[int, ...]], tuple[list[int], int]] = field(default_factory=dict)

    def learn(self, group: str, tokens: list[int], start: int, first: int) -> None:
        for at in range(max(start, first), len(tokens)):
            for n in ORDERS:
                if at >= n:
                    self.last[group, tuple(tokens[at - n : at])] = (tokens, at)

    def draft(self, group: str, tokens: list[int], known: dict[int, int]) -> list[int]:
        for n in reversed(ORDERS):
            found = self.last.get((group, tuple(tokens[-n:]))) if len(tokens) >= n else None
            if found is not None:
                source, at = found
                drafted = source[at : min(at + K, known[id(source)])]
                return drafted + [tokens[-1]] * (K - len(drafted))
        return [tokens[-1]] * K


class Scene:
    """A store, vLLM's request states as tensors, and the twin."""

    def __init__(self, seed: int, *, arena_tokens: int = 1 << 13) -> None:
        self.random = random.Random(seed)
        self.store = GroupStore(
            NUM_ROWS, K, torch.device("cpu"), arena_tokens=arena_tokens, table_entries=1 << 18, max_regions=64
        )
        self.tokens = torch.zeros(NUM_ROWS, WIDTH, dtype=torch.int32)
        self.total = torch.zeros(NUM_ROWS, dtype=torch.int32)
        self.last = torch.zeros(NUM_ROWS, 1, dtype=torch.int64)
        self.twin = Twin()
        self.rows: dict[int, tuple[str, int, list[int]]] = {}
        self.known: dict[int, int] = {}
        self.first: dict[int, int] = {}
        self.kept: list[list[int]] = []  # `known` is by identity, so nothing may be collected
        self.num_requests = 0
        self.groups_seen: set[str] = set()
        self.pending: list[NewRow] = []

    def start(
        self,
        row: int,
        group: str,
        request: int | None = None,
        tokens: list[int] | None = None,
        *,
        at_once: bool = True,
    ) -> None:
        if request is None:
            self.num_requests += 1
            request = self.num_requests
        if tokens is None:
            tokens = list(PROMPTS[group])
            self.first[id(tokens)] = len(tokens) if group in self.groups_seen else 0
            self.known[id(tokens)] = 0
            self.kept.append(tokens)
        self.rows[row] = (group, request, tokens)
        self.tokens[row, : len(tokens)] = torch.tensor(tokens, dtype=torch.int32)
        self.total[row] = len(tokens)
        self.last[row, 0] = tokens[-1]
        self.pending.append(NewRow(row, group, request, len(PROMPTS[group]), WIDTH - 16))
        self.groups_seen.add(group)
        if at_once:
            self.flush()

    def flush(self) -> None:
        """Hand the sequences that start together to the store."""
        self.store.start(self.pending)
        self.pending = []

    def grow(self, row: int, num_tokens: int) -> int:
        _, _, tokens = self.rows[row]
        num_tokens = min(num_tokens, WIDTH - 24 - len(tokens))
        for _ in range(max(0, num_tokens)):
            token = self.random.randrange(1, VOCABULARY)
            self.tokens[row, len(tokens)] = token
            tokens.append(token)
            self.last[row, 0] = token
        self.total[row] = len(tokens)
        return max(0, num_tokens)

    def learn(self, rows: list[int]) -> None:
        self.store.learn(torch.tensor(rows, dtype=torch.int32), self.tokens, self.total)
        for row in rows:
            group, _, tokens = self.rows[row]
            self.twin.learn(group, tokens, self.known[id(tokens)], self.first[id(tokens)])
            self.known[id(tokens)] = len(tokens)

    def draft(self, rows: list[int], num_sampled: list[int]) -> list[list[int]]:
        drafts = self.store.draft(
            torch.tensor(rows, dtype=torch.int32),
            torch.tensor(num_sampled, dtype=torch.int32),
            self.last,
            self.tokens,
            self.total,
        )
        found: list[list[int]] = drafts.tolist()
        return found


@pytest.mark.parametrize("seed", range(4))
def test_drafts_are_what_the_longest_context_of_the_group_continued_with(seed: int) -> None:
    scene = Scene(seed)
    for row in range(NUM_ROWS):
        scene.start(row, "abc"[row % 3], at_once=False)
    scene.flush()
    for step in range(12):
        rows = scene.random.sample(range(NUM_ROWS), scene.random.randrange(1, NUM_ROWS + 1))
        num_sampled = [scene.grow(row, scene.random.randrange(0, K + 2)) for row in rows]
        scene.learn(rows)
        for row, drafted, sampled in zip(rows, scene.draft(rows, num_sampled), num_sampled, strict=True):
            group, _, tokens = scene.rows[row]
            expected = scene.twin.draft(group, tokens, scene.known) if sampled else [tokens[-1]] * K
            assert drafted == expected, f"seed {seed}, step {step}, row {row}"
        if step == 6:  # another request takes a row; the one before goes on serving its siblings
            scene.store.finish([2])
            scene.start(2, "a")
    scene.store.check()


def test_a_request_that_returns_goes_on_in_its_region() -> None:
    scene = Scene(1)
    scene.start(0, "a", request=7)
    _, _, tokens = scene.rows[0]
    scene.grow(0, 9)
    scene.learn([0])
    used = scene.store.counters()["used_arena_tokens"]
    scene.store.finish([0])
    scene.start(3, "a", request=7, tokens=tokens)
    scene.grow(3, 5)
    scene.learn([3])
    assert scene.store.counters()["used_arena_tokens"] == used
    assert scene.draft([3], [1])[0] == scene.twin.draft("a", tokens, scene.known)


def test_groups_without_running_requests_make_room_oldest_first() -> None:
    scene = Scene(2, arena_tokens=2 * 128)
    scene.start(0, "a")
    scene.start(1, "b")
    scene.store.finish([0])
    scene.start(2, "c")
    counters = scene.store.counters()
    assert (counters["num_freed_groups"], counters["num_dropped"], counters["num_groups"]) == (1, 0, 2)
    scene.store.check()


def test_a_sequence_that_finds_no_room_is_counted_and_drafts_from_its_siblings() -> None:
    scene = Scene(3, arena_tokens=128)
    scene.start(0, "a")
    scene.grow(0, 20)
    scene.learn([0])
    scene.start(1, "a")
    assert scene.store.counters()["num_dropped"] == 1
    _, _, tokens = scene.rows[1]
    expected = scene.twin.draft("a", tokens, scene.known)
    assert scene.draft([1], [1])[0] == expected != [tokens[-1]] * K
    scene.learn([0])
    scene.store.check()


def test_what_was_freed_is_not_drafted_by_the_next_owner_of_its_memory() -> None:
    scene = Scene(4, arena_tokens=128)
    scene.start(0, "c")
    scene.grow(0, 60)
    scene.learn([0])
    scene.store.finish([0])
    scene.start(1, "a")  # its prompt repeats a context, so the draft reaches past its last token
    scene.learn([1])
    _, _, tokens = scene.rows[1]
    assert scene.draft([1], [1])[0] == scene.twin.draft("a", tokens, scene.known) == [3, 1, 2, 2]
    scene.store.check()


@pytest.mark.parametrize("seed", range(4))
def test_tokens_from_elsewhere_are_drafted_like_those_that_ran_here(seed: int) -> None:
    scene = Scene(seed)
    scene.start(0, "a")
    scene.start(1, "b")
    scene.learn([0, 1])
    far: dict[tuple[str, int], list[int]] = {("a", 7): [], ("a", 8): [], ("b", 7): []}
    scene.known |= {id(tokens): 0 for tokens in far.values()}
    for _ in range(12):
        tails = []
        for (group, stream), tokens in far.items():
            start = len(tokens)
            tokens += [scene.random.randrange(1, VOCABULARY) for _ in range(scene.random.randrange(0, 6))]
            if len(tokens) > start:
                tails.append(Tail(group, stream, start, np.array(tokens[start:], np.int32), 100))
            scene.twin.learn(group, tokens, start, 0)
            scene.known[id(tokens)] = len(tokens)
        scene.store.receive(tails)
        scene.store.check()
        for row in (0, 1):
            scene.grow(row, scene.random.randrange(1, 4))
        scene.learn([0, 1])
        drafted = scene.draft([0, 1], [1, 1])
        for row in (0, 1):
            group, _, tokens = scene.rows[row]
            assert drafted[row] == scene.twin.draft(group, tokens, scene.known)


def test_tokens_of_a_group_that_is_not_here_are_not_kept() -> None:
    scene = Scene(0)
    scene.start(0, "a")
    before = scene.store.counters()["used_arena_tokens"]
    scene.store.receive([Tail("b", 1, 0, np.array([1, 2], np.int32), 50)])
    assert scene.store.counters()["used_arena_tokens"] == before
    scene.store.receive([Tail("a", 1, 0, np.array([1, 2], np.int32), 50)])
    assert scene.store.counters()["used_arena_tokens"] > before


def tail(group: str, stream: int, max_tokens: int) -> Tail:
    return Tail(group, stream, 0, np.array([1, 2, 3], np.int32), max_tokens)


def test_a_group_that_receives_tokens_does_not_make_room_for_them() -> None:
    scene = Scene(6, arena_tokens=128)
    scene.start(0, "a")
    scene.store.finish([0])
    scene.store.receive([tail("a", 7, 100)])
    counters = scene.store.counters()
    assert (counters["num_freed_groups"], counters["num_dropped"], counters["num_groups"]) == (0, 1, 1)
    scene.store.check()


def test_groups_that_receive_tokens_together_keep_their_memory() -> None:
    scene = Scene(7, arena_tokens=3 * 128)
    for row, group in enumerate("abc"):
        scene.start(row, group)
    scene.store.finish([0, 1, 2])
    scene.store.receive([tail("a", 7, 100), tail("b", 7, 100)])  # the third makes room for one of them
    counters = scene.store.counters()
    assert (counters["num_freed_groups"], counters["num_dropped"], counters["num_groups"]) == (1, 1, 2)
    scene.store.check()
    scene.store.reset()
    assert scene.store.counters()["used_arena_tokens"] == 0
    scene.store.check()


def test_a_group_that_has_ended_is_freed_once_none_of_its_requests_runs() -> None:
    scene = Scene(8)
    scene.start(0, "a")
    scene.start(1, "b")
    scene.start(2, "a")
    scene.store.finish([1])
    scene.store.end(["a", "b", "never seen"])
    assert scene.store.counters()["num_groups"] == 1
    scene.store.finish([0])
    assert scene.store.counters()["num_groups"] == 1
    scene.learn([2])  # it is aborted a little later
    scene.store.finish([2])
    counters = scene.store.counters()
    assert (counters["num_groups"], counters["used_arena_tokens"], counters["num_freed_groups"]) == (0, 0, 0)
    scene.store.check()


def test_a_row_that_goes_on_without_drafts_is_neither_learned_nor_drafted_for() -> None:
    scene = Scene(9)
    scene.start(0, "a")
    _, _, tokens = scene.rows[0]
    scene.grow(0, 12)
    scene.learn([0])
    scene.store.finish([0])
    scene.store.ignore([0, 3])
    scene.tokens[0, len(tokens) : len(tokens) + 9] = VOCABULARY + 1  # of a request that the store was not told of
    scene.total[0] = len(tokens) + 9
    everyone = torch.tensor([0, 3], dtype=torch.int32)
    scene.store.learn(everyone, scene.tokens, scene.total)
    assert scene.draft([0], [1])[0] == [tokens[-1]] * K
    scene.start(1, "a", tokens=tokens[:-1], request=2)
    scene.known[id(tokens)] = len(tokens)
    assert scene.draft([1], [1])[0][0] == tokens[-1]
    assert VOCABULARY + 1 not in scene.draft([1], [1])[0]


def test_the_prompt_is_indexed_again_when_the_request_that_had_it_needs_more_room() -> None:
    scene = Scene(10)
    prompt = [1, 2, 3, 4, 5, 6, 1]
    rows = torch.tensor([0, 1], dtype=torch.int32)
    for row in (0, 1):
        scene.tokens[row, : len(prompt)] = torch.tensor(prompt, dtype=torch.int32)
        scene.total[row] = len(prompt)
        scene.last[row, 0] = prompt[-1]
    scene.store.start([NewRow(0, "a", 1, len(prompt), 30), NewRow(1, "a", 2, len(prompt), 30)])
    scene.store.learn(rows, scene.tokens, scene.total)
    scene.store.finish([0])
    scene.store.start([NewRow(0, "a", 1, len(prompt), 90)])  # its environment gave it tokens, so it may become longer
    scene.store.start([NewRow(2, "b", 3, len(prompt), 30)])  # what it gave back
    scene.store.learn(rows, scene.tokens, scene.total)
    assert scene.draft([1], [1])[0] == [2, 3, 4, 5]
    scene.store.check()


def test_a_reset_forgets_every_group() -> None:
    scene = Scene(5)
    scene.start(0, "a")
    scene.grow(0, 30)
    scene.learn([0])
    scene.store.reset()
    assert scene.store.counters()["used_arena_tokens"] == scene.store.counters()["num_groups"] == 0
    assert scene.draft([0], [1])[0] == [int(scene.last[0, 0])] * K
    scene.store.check()


@pytest.mark.parametrize("seed", range(3))
def test_drafts_are_accepted_while_they_equal_the_samples(seed: int) -> None:
    generator = torch.Generator().manual_seed(seed)
    counts = torch.randint(1, K + 2, (9,), generator=generator)
    starts = torch.cat([torch.zeros(1, dtype=torch.int64), counts.cumsum(0)]).to(torch.int32)
    sampled = torch.randint(0, 2, (int(starts[-1]),), generator=generator)
    inputs = torch.randint(0, 2, (int(starts[-1]),), generator=generator).to(torch.int32)
    accepted = torch.full((9, K + 1), -9, dtype=torch.int64)
    num_accepted = torch.zeros(9, dtype=torch.int32)
    accept_kernel[(9,)](
        sampled, inputs, starts, accepted, accepted.stride(0), num_accepted, WIDTH=triton.next_power_of_2(K + 1)
    )
    for b in range(9):
        start, expected = int(starts[b]), []
        for i in range(int(counts[b])):
            expected.append(int(sampled[start + i]))
            if i + 1 >= int(counts[b]) or int(sampled[start + i]) != int(inputs[start + i + 1]):
                break
        assert accepted[b, : int(num_accepted[b])].tolist() == expected
