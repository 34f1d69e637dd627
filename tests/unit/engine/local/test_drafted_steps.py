# SPDX-License-Identifier: Apache-2.0
"""Several steps with drafts at once, with a device that samples from a script: the engine generates the script."""

from __future__ import annotations

import random
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest

pytest.importorskip("torch")

from engines import SessionDrafter, a_chunk, always, an_engine, generate, knowing, random_trees, tokens_of
from seer.engine.local.batch import Work
from seer.engine.local.drafted_steps import run_drafted_steps
from seer.engine.local.engine import Engine
from seer.engine.local.graph_shapes import Shape
from seer.engine.local.runner import PlainRunner
from seer.engine.local.tiny import make_tiny_model
from seer.engine.local.uniform_rows import POSITION, SEQ_SLOT
from seer.speculation.step_report import StepReport
from seer.types import ChunkEnd

PROMPT = [5, 6, 7]
STOP = 100
LENGTHS = (40, 23, 31, 9, 40)


class ScriptedRunner(PlainRunner):
    """Prompts are computed; what follows them is read from a script."""

    def __init__(self, engine: Engine, script: dict[int, list[int]]) -> None:
        super().__init__(engine.model, engine.scheduler)
        self.script = script
        self.shape, self.inputs = Shape(1, 1), np.empty(0, np.int32)
        self.moved: list[tuple[int, int]] = []

    def burst_length(self, works: Sequence[Work]) -> int:
        return 4

    def run_drafted(self, works: Sequence[Work], session: Any, allowance: Any, *, until_one_ends: bool) -> Any:
        return run_drafted_steps(
            works, session, allowance, scheduler=self.scheduler, choose=self.choose,
            move=lambda source, target: self.moved.extend(zip(source, target, strict=True)),
            max_steps=4, until_one_ends=until_one_ends,
        )  # fmt: skip

    def choose(self, num_chunks: int, tokens_per_chunk: int) -> tuple[Shape, ScriptedRunner]:
        self.shape = Shape.of(num_chunks, tokens_per_chunk)
        self.inputs = np.empty(6 * self.shape.num_batched_tokens + 2 * self.shape.num_nodes, np.int32)
        return self.shape, self

    def run(self, works: list[Work] | None = None) -> Any:  # a step's `run`, and a runner's
        if works is not None:
            samples = super().run(works)
            for work in works:
                depths = [0, *work.tree.depths()] if work.tree else [0]
                for row, depth in enumerate(depths if work.samples else [], work.first_sample):
                    at = work.active.num_response + depth
                    samples.tokens[row] = self.script[work.active.chunk.request][at]
            return samples
        rows = self.inputs[: 6 * self.shape.num_batched_tokens].reshape(6, -1)
        by_seq_slot = {active.seq_slot: self.script[active.chunk.request] for active in self.scheduler.running}
        sampled = np.ones((self.shape.num_batched_tokens, 4), np.float32)
        for row, (seq_slot, position) in enumerate(zip(rows[SEQ_SLOT], rows[POSITION], strict=True)):
            tokens, at = by_seq_slot.get(int(seq_slot), [0]), int(position) + 1 - len(PROMPT)
            sampled[row, 0:1].view(np.int32)[0] = tokens[max(0, min(at, len(tokens) - 1))]
        return sampled


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_tiny_model(tmp_path_factory.mktemp("model"))


@pytest.fixture(scope="module")
def script() -> dict[int, list[int]]:
    dice = random.Random(7)
    return {request: [dice.randrange(100) for _ in range(60)] for request in range(len(LENGTHS))}


@pytest.mark.parametrize("max_num_seqs", [5, 2])
@pytest.mark.parametrize("kind", ["knowing", "random"])
def test_each_chunk_generates_the_script_up_to_its_limit(
    folder: Path, script: dict[int, list[int]], max_num_seqs: int, kind: str
) -> None:
    steps: list[StepReport] = []
    drafter = SessionDrafter((knowing(script, tree=True) if kind == "knowing" else random_trees(3, 128)).propose)
    engine = an_engine(folder, max_num_seqs=max_num_seqs, drafter=drafter, budget=always(5), on_step=steps.append)
    engine.runner = runner = ScriptedRunner(engine, script)
    chunks = [a_chunk(request, PROMPT, max_tokens=length) for request, length in enumerate(LENGTHS)]
    answers = generate(engine, chunks)
    assert tokens_of(answers) == {request: script[request][:length] for request, length in enumerate(LENGTHS)}
    assert drafter.observed == tokens_of(answers)
    assert all(answer.end is ChunkEnd.LIMIT for answer in answers.values())
    together = [step for step in steps if step.num_steps > 1]
    assert together
    for step in together:
        assert step.num_batched_tokens <= max_num_seqs * 6
        assert step.num_emitted - step.num_accepted <= step.num_running * step.num_steps
    accepted = sum(answer.num_accepted for answer in answers.values())
    assert accepted == sum(step.num_accepted for step in steps)
    if kind == "knowing":
        assert accepted > 30
        assert runner.moved, "no side path was accepted at a burst's end"


def test_a_stop_token_ends_a_chunk_within_a_burst(folder: Path, script: dict[int, list[int]]) -> None:
    script = {0: [*script[0][:9], STOP, *script[0][9:]], 1: script[1]}
    engine = an_engine(folder, drafter=SessionDrafter(knowing(script, tree=True).propose), budget=always(5))
    engine.runner = ScriptedRunner(engine, script)
    answers = generate(engine, [a_chunk(r, PROMPT, max_tokens=30, stop_token_ids=(STOP,)) for r in script])
    assert answers[0].ids == script[0][:10]
    assert (answers[0].end, answers[0].stop_token) == (ChunkEnd.STOP, STOP)
    assert answers[1].ids == script[1][:30]


def test_while_a_chunk_waits_a_burst_ends_with_the_first_chunk_that_ends(
    folder: Path, script: dict[int, list[int]]
) -> None:
    steps: list[StepReport] = []
    drafter = SessionDrafter(random_trees(1, 128).propose)
    engine = an_engine(folder, max_num_seqs=2, drafter=drafter, budget=always(2), on_step=steps.append)
    engine.runner = ScriptedRunner(engine, script)
    for request, max_tokens in enumerate((3, 30, 30)):
        engine.add(a_chunk(request, PROMPT, max_tokens=max_tokens))
    while engine.scheduler.waiting:
        engine.step()
    assert sum(step.num_steps for step in steps) <= 2 + 3  # prompts, then a token or more a step
