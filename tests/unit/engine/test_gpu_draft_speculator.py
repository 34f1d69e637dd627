# SPDX-License-Identifier: Apache-2.0
"""The speculator beside a runner: requests come, go, are aborted and preempted; interpreted by Triton.

Every group of every run has tokens of its own, so a draft tells whom it was taken from.
"""

from __future__ import annotations

import os
import random
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("triton", reason="Triton is not installed")
if os.environ.get("TRITON_INTERPRET") != "1":
    pytest.skip("set TRITON_INTERPRET=1 to interpret the kernels", allow_module_level=True)
pytest.importorskip("vllm", reason="vLLM is not installed")

import interpreted_vllm  # noqa: F401 - before vLLM's own modules
from chunk_facts_cases import GOOD
from seer.engine.vllm.gpu_drafts.siblings import SIBLINGS, Tail
from seer.engine.vllm.gpu_drafts.speculator import GroupedSpeculator
from vllm_engines import needs_vllm

pytestmark = needs_vllm

NUM_ROWS, WIDTH, K, MAX_LEFT = 5, 160, 4, 60
PER_GROUP = 1000
"""Tokens of one group lie between multiples of this; few of them are used, so that contexts repeat."""


@dataclass
class ARequest:
    number: int
    group: int
    tokens: list[int]
    is_ours: bool = True
    drafts: str = "grouped"
    attempt: int = 0
    name: str = ""
    num_prompt: int = 0


class Runner:
    """What the speculator reads and wraps of vLLM's runner; rows are given away again as soon as they are free."""

    def __init__(self) -> None:
        self.req_states = SimpleNamespace(
            req_id_to_index={},
            all_token_ids=SimpleNamespace(gpu=torch.zeros(NUM_ROWS, WIDTH, dtype=torch.int32)),
            total_len=SimpleNamespace(gpu=torch.zeros(NUM_ROWS, dtype=torch.int32)),
        )

    def finish_requests(self, output: Any) -> None:
        for name in output.finished_req_ids | output.preempted_req_ids:
            self.req_states.req_id_to_index.pop(name, None)

    def add_requests(self, output: Any) -> None:
        rows = self.req_states.req_id_to_index
        for one in output.scheduled_new_reqs:
            row = rows[one.req_id] = min(set(range(NUM_ROWS)) - set(rows.values()))
            self.write(row, one.prefill_token_ids)

    def write(self, row: int, tokens: list[int]) -> None:
        self.req_states.all_token_ids.gpu[row, : len(tokens)] = torch.tensor(tokens, dtype=torch.int32)
        self.req_states.total_len.gpu[row] = len(tokens)


@dataclass
class Scene:
    """A speculator beside a runner, and what happens to them."""

    seed: int
    arena_tokens: int = 4096
    random: random.Random = field(init=False)
    run: tuple[str, int] = ("run0", 0)
    num_requests: int = 0
    first_group: int = 0
    """Of the present run."""
    waiting: list[ARequest] = field(default_factory=list)
    running: dict[str, ARequest] = field(default_factory=dict)
    ended_groups: list[int] = field(default_factory=list)
    """Not told to the speculator so far."""
    num_siblings_drafted: int = 0

    def __post_init__(self) -> None:
        self.random = random.Random(self.seed)
        config: Any = SimpleNamespace(
            additional_config={"seer": {"arena_tokens": self.arena_tokens, "table_entries": 1 << 16}},
            speculative_config=SimpleNamespace(num_speculative_tokens=K),
            model_config=SimpleNamespace(max_model_len=WIDTH - 20),
            scheduler_config=SimpleNamespace(max_num_seqs=NUM_ROWS),
        )
        self.speculator = GroupedSpeculator(config, torch.device("cpu"))
        self.runner = Runner()
        self.speculator.bind(self.runner)
        self.last = torch.zeros(NUM_ROWS, 1, dtype=torch.int64)

    def token(self, group: int) -> int:
        return PER_GROUP * (1 + group) + self.random.randrange(3)

    def arrive(self, group: int, *, is_ours: bool = True, drafts: str = "grouped") -> None:
        self.num_requests += 1
        tokens = [PER_GROUP * (1 + group) + at % 3 for at in range(5)]  # siblings have one prompt
        self.waiting.append(ARequest(self.num_requests, group, tokens, is_ours, drafts, num_prompt=len(tokens)))

    def step(
        self,
        *,
        finished: set[str] | None = None,
        preempted: set[str] | None = None,
        depth: int = K,
        tails: list[Tail] | None = None,
        num_new: int = NUM_ROWS,
    ) -> dict[str, list[int]]:
        """One step of vLLM; returns the drafts for each request."""
        finished, preempted = finished or set(), preempted or set()
        gone = {name: self.running.pop(name) for name in finished | preempted}
        self.waiting += [one for name, one in gone.items() if name in preempted]
        coming = [self.waiting.pop(0) for _ in range(min(num_new, len(self.waiting), NUM_ROWS - len(self.running)))]
        output: Any = SimpleNamespace(
            finished_req_ids=finished,
            preempted_req_ids=preempted,
            scheduled_new_reqs=[self._as_vllm_has_it(one) for one in coming],
            num_spec_tokens_to_schedule=depth,
        )
        if tails:
            setattr(output, SIBLINGS, tails)
        self.runner.finish_requests(output)
        self.runner.add_requests(output)
        self.running |= {one.name: one for one in coming}
        return self._computed(depth)

    def _as_vllm_has_it(self, one: ARequest) -> Any:
        one.attempt += 1
        one.name = f"{one.number}.{one.attempt}"
        extra = None
        if one.is_ours:
            ended, self.ended_groups = self.ended_groups, []
            facts = {
                "request": one.number,
                "attempt": one.attempt,
                "group": one.group,
                "run": self.run[0],
                "weights_version": self.run[1],
                "num_prompt_tokens": one.num_prompt,
                "max_left": MAX_LEFT - (len(one.tokens) - one.num_prompt),
                "drafts": one.drafts,
                "ended_groups": ended,
            }
            extra = {"seer": GOOD | facts}
        return SimpleNamespace(
            req_id=one.name,
            prefill_token_ids=list(one.tokens),
            prompt_token_ids=list(one.tokens),
            sampling_params=SimpleNamespace(extra_args=extra),
        )

    def _computed(self, depth: int) -> dict[str, list[int]]:
        states = self.runner.req_states
        batch = self.random.sample(sorted(self.running), len(self.running))
        num_sampled = []
        for name in batch:
            one, row = self.running[name], states.req_id_to_index[name]
            left = one.num_prompt + MAX_LEFT - len(one.tokens)
            num_sampled.append(min(self.random.randrange(0, depth + 2), left))
            one.tokens += [self.token(one.group) for _ in range(num_sampled[-1])]
            self.runner.write(row, one.tokens)
            self.last[row, 0] = one.tokens[-1]
        rows = torch.tensor([states.req_id_to_index[name] for name in batch], dtype=torch.int32)
        counts = torch.tensor(num_sampled, dtype=torch.int32)
        if not batch:
            return {}
        input_batch = SimpleNamespace(idx_mapping=rows, num_reqs=len(batch))
        drafts = self.speculator.propose(input_batch, None, None, None, None, counts, counts, self.last)
        self.speculator.store.check()
        return dict(zip(batch, drafts.tolist(), strict=True)) if depth else {}

    def begin_run(self) -> None:
        """Other weights: everything that ran has ended."""
        self.step(finished=set(self.running), num_new=0)
        self.waiting.clear()
        self.ended_groups.clear()
        self.run = (f"run{self.run[1] + 1}", self.run[1] + 1)
        self.first_group += 10

    def assert_own(self, drafts: dict[str, list[int]]) -> None:
        for name, drafted in drafts.items():
            one = self.running[name]
            if not one.is_ours or one.drafts == "none":
                assert drafted == [one.tokens[-1]] * K, f"seed {self.seed}: {name} does not draft"
            groups = {token // PER_GROUP - 1 for token in drafted}
            assert groups == {one.group}, f"seed {self.seed}: {name} of group {one.group} drafted from {groups}"
            self.num_siblings_drafted += drafted != [one.tokens[-1]] * K


@pytest.mark.parametrize("arena_tokens", [4096, 6 * 96])
@pytest.mark.parametrize("seed", range(int(os.environ.get("SEER_SPECULATOR_SEEDS", "2"))))
def test_drafts_come_from_the_request_s_own_group_whatever_happens(seed: int, arena_tokens: int) -> None:
    scene = Scene(seed, arena_tokens)
    pick = scene.random
    num_far: dict[tuple[int, int], int] = {}
    for at in range(60):
        if at % 30 == 29:
            scene.begin_run()
            num_far.clear()
        groups = range(scene.first_group, scene.first_group + 4)
        for _ in range(pick.randrange(3)):
            kind = pick.random()
            group = pick.choice(groups)
            if kind < 0.1:
                scene.arrive(100 + scene.num_requests, is_ours=False)
            elif kind < 0.2:
                scene.arrive(200 + scene.num_requests, drafts="none")
            elif len(scene.waiting) < 6:
                scene.arrive(group)
        names = sorted(scene.running)
        gone = set(pick.sample(names, min(len(names), pick.randrange(3))))
        preempted = {name for name in gone if pick.random() < 0.3}
        for name in gone - preempted:
            one = scene.running[name]
            if pick.random() < 0.6 and len(one.tokens) < one.num_prompt + MAX_LEFT:
                # Its next chunk. Tokens that a step in flight added after its end are not part of it.
                length = max(one.num_prompt, len(one.tokens) - pick.randrange(3))
                scene.waiting.append(
                    ARequest(one.number, one.group, one.tokens[:length], one.is_ours, one.drafts, num_prompt=5)
                )
                scene.waiting[-1].attempt = one.attempt
        if pick.random() < 0.1:
            here = {one.group for one in (*scene.running.values(), *scene.waiting)}
            scene.ended_groups += [group for group in groups if group not in here]
        tails = []
        for _ in range(pick.randrange(3)):
            group, stream = pick.choice(groups), pick.randrange(9000, 9003)
            start, count = num_far.get((group, stream), 0), pick.randrange(1, 6)
            num_far[group, stream] = start + count
            tokens = np.array([scene.token(group) for _ in range(count)], np.int32)
            tails.append(Tail(group, stream, start, tokens, MAX_LEFT))
        depth = pick.choice([0, K, K])
        scene.assert_own(scene.step(finished=gone - preempted, preempted=preempted, depth=depth, tails=tails))
    assert scene.num_siblings_drafted > 20, "few drafts were looked at"


def test_a_group_that_ended_is_freed_with_the_next_request() -> None:
    scene = Scene(0)
    scene.arrive(1)
    scene.arrive(2)
    scene.step()
    scene.step(finished={"1.1"})
    assert scene.speculator.store.counters()["num_groups"] == 2
    scene.ended_groups = [1]
    scene.arrive(2)
    scene.step()
    assert scene.speculator.store.counters()["num_groups"] == 1


def test_other_weights_forget_what_was_drafted_from() -> None:
    scene = Scene(0)
    scene.arrive(1)
    for _ in range(6):
        scene.step()
    scene.begin_run()
    scene.arrive(1)
    (drafted,) = scene.step(depth=K).values()
    one = next(iter(scene.running.values()))
    counters = scene.speculator.store.counters()
    assert counters["num_groups"] == 1
    assert counters["used_arena_tokens"] < 128, "only the region of the new run's request"
    assert set(drafted) <= {*one.tokens}
