# SPDX-License-Identifier: Apache-2.0
"""The embedded engine over recorded responses, without a device: for benchmarks of the host's part.

A stub replaces the model runner and samples the recorded tokens, so drafts are accepted as they would have been. Each
request is the last of its group. The drafter knows the others.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from seer.drafting.base import Allowance, DraftBudget, DraftSession
from seer.drafting.grouped_drafter import GroupedDrafter
from seer.drafting.recording import read_groups
from seer.engine.local.assembly import EngineSettings, assemble, choose_limits
from seer.engine.local.batch import Work
from seer.engine.local.drafted_steps import run_drafted_steps
from seer.engine.local.engine import Engine
from seer.engine.local.graph_shapes import Shape
from seer.engine.local.model_config import read_config
from seer.engine.local.runner import DraftedSteps
from seer.engine.local.sampling import Samples
from seer.engine.local.uniform_rows import POSITION, SEQ_SLOT
from seer.speculation.step_report import StepObserver
from seer.types import Chunk, Sampling

MAX_PROMPT_TOKENS, MAX_TOKENS = 96, 400
"""Prompts and responses are cut to this: the tiny model has a short context."""
VOCABULARY = 1 << 18
"""Of the tiny model: it must have every token id that a recording holds."""
BURST = 8


@dataclass
class Recording:
    """Prompts, and the responses to each."""

    prompts: list[list[int]]
    responses: list[list[list[int]]]

    @classmethod
    def read(cls, trace: Path, num_groups: int) -> Recording:
        groups = read_groups(trace)[:num_groups]
        prompts = [group.prompt[-MAX_PROMPT_TOKENS:].tolist() for group in groups]
        responses = [[tokens[:MAX_TOKENS].tolist() for tokens in group.responses] for group in groups]
        return cls(prompts, responses)

    def teach(self, drafter: GroupedDrafter) -> None:
        """Index the siblings of every request, and nothing else."""
        drafter.begin_run("recorded", "grouped", 0)
        for group, responses in enumerate(self.responses):
            for number, tokens in enumerate(responses[:-1]):
                drafter.observe(group, 10_000 + 100 * group + number, tokens, start=0)
        drafter.learn()

    def begin(self, engine: Engine) -> None:
        """One request of each group, as if its prompt had been computed."""
        for group, (prompt, responses) in enumerate(zip(self.prompts, self.responses, strict=True)):
            engine.add(a_chunk(group, prompt, len(responses[-1])))
        engine.scheduler.plan()
        for active in engine.scheduler.running:
            active.num_computed = len(active.tokens) - 1


def a_chunk(group: int, prompt: Sequence[int], num_tokens: int) -> Chunk:
    return Chunk(
        request=group, group=group, attempt=1, num_prompt_tokens=len(prompt), num_generated_tokens=0,
        max_tokens=num_tokens, sampling=Sampling(max_tokens=num_tokens, ignore_eos=True, temperature=1.0),
        seed=group, weights_version=0, prompt=list(prompt),
    )  # fmt: skip


def recorded_engine(
    folder: Path, recording: Recording, drafter: GroupedDrafter, budget: DraftBudget, on_step: StepObserver
) -> tuple[Engine, RecordedRunner]:
    """An engine with room for one request of each group."""
    batch, config = len(recording.prompts), read_config(folder)
    limits = choose_limits(
        config, EngineSettings(), block_size=16, max_num_seqs=batch, kv_blocks=batch * 64, max_model_len=512
    )
    settings = EngineSettings(max_step_tokens=8192, drafter=drafter, budget=budget, kernels="torch", on_step=on_step)
    engine = assemble(0, folder, config, limits, settings)
    engine.runner = runner = RecordedRunner(engine, recording)
    return engine, runner


class RecordedStep:
    """A device step that takes no time and samples the recorded tokens."""

    def __init__(self, runner: RecordedRunner) -> None:
        self.runner, self.inputs, self.shape = runner, np.empty(0, np.int32), Shape(1, 1)

    def of(self, shape: Shape) -> RecordedStep:
        self.shape = shape
        self.inputs = np.empty(6 * shape.num_batched_tokens + 2 * shape.num_nodes, np.int32)
        return self

    def run(self) -> NDArray[np.float32]:
        began_s = time.perf_counter()
        rows = self.inputs[: 6 * self.shape.num_batched_tokens].reshape(6, self.shape.num_batched_tokens)
        sampled = np.ones((self.shape.num_batched_tokens, 4), np.float32)
        table = self.runner.recorded
        at = np.minimum(rows[POSITION] + 1 - self.runner.num_prompt[rows[SEQ_SLOT]], table.shape[1] - 1)
        sampled[:, 0].view(np.int32)[...] = table[rows[SEQ_SLOT], at]
        self.runner.device_s += self.runner.price(self.shape.num_batched_tokens)
        self.runner.sampling_s += time.perf_counter() - began_s
        return sampled


class RecordedRunner:
    """Replaces the GPU's runner, for chunks that decode."""

    num_captured = 0

    def __init__(self, engine: Engine, recording: Recording) -> None:
        self.engine = engine
        self.recorded = np.zeros((len(recording.prompts) + 1, MAX_TOKENS), np.int32)  # by seq_slot, the spare one too
        for seq_slot, responses in enumerate(recording.responses):
            self.recorded[seq_slot, : len(responses[-1])] = responses[-1]
        self.num_prompt = np.array([*map(len, recording.prompts), 0])
        self.step = RecordedStep(self)
        self.sampling_s = 0.0
        """Host time spent in this stub."""
        self.price: Callable[[int], float] = lambda num_batched_tokens: 0.0
        """Seconds of a step with so many batched tokens."""
        self.device_s = 0.0
        """Sum of the prices of all steps."""

    def run_drafted(
        self, works: Sequence[Work], session: DraftSession, allowance: Allowance, *, until_one_ends: bool
    ) -> DraftedSteps:
        return run_drafted_steps(
            works, session, allowance, scheduler=self.engine.scheduler, choose=self.choose,
            move=lambda source, target: None, max_steps=BURST, until_one_ends=until_one_ends,
        )  # fmt: skip

    def choose(self, num_chunks: int, tokens_per_chunk: int) -> tuple[Shape, RecordedStep]:
        shape = Shape.of(num_chunks, tokens_per_chunk)
        return shape, self.step.of(shape)

    def run(self, works: list[Work]) -> Samples:
        raise NotImplementedError

    def burst_length(self, works: Sequence[Work]) -> int:
        return BURST

    def burst(self, works: Sequence[Work], num_steps: int) -> list[Samples]:
        self.device_s += num_steps * self.price(Shape.of(len(works), 1).num_batched_tokens)
        steps = []
        for ahead in range(num_steps):
            tokens = []
            for active in (work.active for work in works):
                at = min(len(active.tokens) + ahead - active.chunk.num_prompt_tokens, MAX_TOKENS - 1)
                tokens.append(int(self.recorded[active.seq_slot, at]))
            steps.append(Samples(tokens, [0.0] * len(works), [0.0] * len(works)))
        return steps
