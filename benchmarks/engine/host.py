"""What the host needs for a step of the embedded engine on a GPU, without one: everything but the device's part.

    python benchmarks/engine/host.py --trace ../shared/traces/qwen1.5b-mix-n16.npz [--batches 1,8,64] [--profile]

Plans, drafts, lays out, settles, learns and reports as the engine does, over real grouped responses: a stub in the
runner's place draws the recorded tokens, so drafts are accepted as they would have been. `aside` is what a GPU
computes beside (the host does it between a step's start and its end); only the rest makes steps longer.
"""

from __future__ import annotations

import argparse
import cProfile
import json
import pstats
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import torch
from numpy.typing import NDArray

from seer.engine.drafter import Allowance, Following, StepReport
from seer.engine.host.drafts import GroupedDrafter
from seer.engine.local.assembly import EngineSettings, assemble, choose_limits
from seer.engine.local.batch import Work
from seer.engine.local.drafted_steps import follow
from seer.engine.local.engine import Engine
from seer.engine.local.folder import read_config
from seer.engine.local.graph_shapes import Shape
from seer.engine.local.runner import Followed
from seer.engine.local.sampling import Draws
from seer.engine.local.tiny import make_tiny_model
from seer.engine.local.uniform_rows import LANE, POSITION
from seer.types import Chunk, Sampling

NUM_SIBLINGS = 15
"""Of each request: finished, and known to the drafter."""
MAX_TOKENS = 400


class RecordedStep:
    """A device that takes no time: draws what was recorded."""

    def __init__(self, runner: RecordedRunner) -> None:
        self.runner, self.told, self.shape = runner, np.empty(0, np.int32), Shape(1, 1)

    def of(self, shape: Shape) -> RecordedStep:
        self.shape = shape
        self.told = np.empty(6 * shape.num_rows + 2 * shape.num_nodes, np.int32)
        return self

    def run(self) -> NDArray[np.float32]:
        began_s = time.perf_counter()
        rows = self.told[: 6 * self.shape.num_rows].reshape(6, self.shape.num_rows)
        drawn = np.ones((self.shape.num_rows, 4), np.float32)
        table = self.runner.said
        at = np.minimum(rows[POSITION] + 1 - self.runner.num_prompt[rows[LANE]], table.shape[1] - 1)
        drawn[:, 0].view(np.int32)[...] = table[rows[LANE], at]
        self.runner.drawing_s += time.perf_counter() - began_s
        return drawn


class RecordedRunner:
    """In the place of the GPU's, as far as steps with drafts go."""

    num_captured = 0

    def __init__(self, engine: Engine, said: Sequence[Sequence[int]], num_prompt: Sequence[int]) -> None:
        self.engine = engine
        self.said = np.zeros((len(said) + 1, MAX_TOKENS), np.int32)  # by lane, the spare one too
        for lane, tokens in enumerate(said):
            self.said[lane, : len(tokens)] = tokens
        self.num_prompt = np.array([*num_prompt, 0])
        self.step = RecordedStep(self)
        self.drawing_s = 0.0
        """The stub's own work."""

    def can_follow(self, works: Sequence[Work]) -> bool:
        return True

    def follow(
        self, works: Sequence[Work], following: Following, allowance: Allowance, *, until_one_ends: bool
    ) -> Followed:
        return follow(
            works, following, allowance, scheduler=self.engine.scheduler, choose=self.choose,
            move=lambda source, target: None, max_steps=8, until_one_ends=until_one_ends,
        )  # fmt: skip

    def choose(self, num_chunks: int, rows_per_chunk: int) -> tuple[Shape, RecordedStep]:
        shape = Shape.of(num_chunks, rows_per_chunk)
        return shape, self.step.of(shape)

    def run(self, works: list[Work]) -> Draws:
        raise NotImplementedError

    def burst_length(self, works: Sequence[Work]) -> int:
        raise NotImplementedError

    def burst(self, works: Sequence[Work], num_steps: int) -> list[Draws]:
        raise NotImplementedError


def measure(folder: Path, trace: Path, batch: int, allowance: Allowance, *, profile: bool) -> dict[str, float]:
    """Microseconds of a step's host work, and what it gained."""
    prompts, said = read_groups(trace, num_groups=-(-batch // 4))
    drafter = GroupedDrafter((), None)
    config = read_config(folder)
    limits = choose_limits(
        config, EngineSettings(), block_tokens=16, max_running=batch, kv_blocks=batch * 64, max_context_tokens=512
    )
    steps: list[StepReport] = []
    settings = EngineSettings(
        max_step_tokens=8192, drafter=drafter, budget=lambda n, c: allowance, kernels="torch", on_step=steps.append
    )
    engine = assemble(0, folder, config, limits, settings)
    recorded = [said[request % len(said)][NUM_SIBLINGS] for request in range(batch)]
    num_prompt = [len(prompts[request % len(said)]) for request in range(batch)]
    engine.runner = runner = RecordedRunner(engine, recorded, num_prompt)
    best: dict[str, float] = {}
    watch = cProfile.Profile() if profile else None
    for _ in range(5):
        drafter.begin_run("host", "grouped", 0)
        for group, responses in enumerate(said):
            for number, tokens in enumerate(responses[:NUM_SIBLINGS]):
                drafter.observe(group, 10_000 + 100 * group + number, tokens, start=0)
        drafter.learn()
        for request, tokens in enumerate(recorded):
            group = request % len(said)
            engine.add(a_chunk(request, group, prompts[group], len(tokens)))
        engine.scheduler.plan()
        for active in engine.scheduler.running:  # as if the prompts had been computed
            active.num_computed = len(active.tokens) - 1
        steps.clear()
        num_tokens = 0
        if watch:
            watch.enable()
        began_s = time.perf_counter()
        while engine.busy:
            num_tokens += sum(output.num_tokens for output in engine.step())
        wall_s = time.perf_counter() - began_s - runner.drawing_s
        runner.drawing_s = 0.0
        if watch:
            watch.disable()
        num_steps = sum(step.num_steps for step in steps)
        num_works = num_tokens - sum(step.num_accepted for step in steps)  # requests, each counted once a step
        found = {
            "us_per_step": wall_s / num_steps * 1e6,
            "us_per_request": wall_s / num_works * 1e6,
            "requests_per_step": num_works / num_steps,
            "tokens_per_request": num_tokens / num_works,
        }
        if not best or found["us_per_step"] < best["us_per_step"]:
            best = found
    if watch:
        pstats.Stats(watch).sort_stats("tottime").print_stats(25)
    return best


def read_groups(trace: Path, num_groups: int) -> tuple[list[list[int]], list[list[list[int]]]]:
    """Prompts, and the responses to each."""
    data = np.load(trace)
    lengths, num_prompt = data["lengths"], data["prompt_lengths"]
    ends, prompt_ends = np.cumsum(lengths.ravel()).reshape(lengths.shape), np.cumsum(num_prompt)
    prompts, said = [], []
    for group in range(num_groups):
        last = int(prompt_ends[group])
        prompts.append(data["prompts"][last - min(96, int(num_prompt[group])) : last].tolist())
        spans = zip(ends[group].tolist(), lengths[group].tolist(), strict=True)
        said.append([data["tokens"][end - size : end][:MAX_TOKENS].tolist() for end, size in spans])
    return prompts, said


def a_chunk(request: int, group: int, prompt: Sequence[int], num_tokens: int) -> Chunk:
    return Chunk(
        request=request, group=group, attempt=1, num_prompt_tokens=len(prompt), num_generated_tokens=0,
        max_tokens=num_tokens, sampling=Sampling(max_tokens=num_tokens, ignore_eos=True, temperature=1.0),
        seed=request, epoch=0, prompt=list(prompt),
    )  # fmt: skip


def main() -> int:
    options = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    options.add_argument("--trace", type=Path, required=True, help="grouped responses, an .npz of shared/traces")
    options.add_argument("--batches", default="1,8,64")
    options.add_argument("--profile", action="store_true", help="also where it goes, function by function")
    args = options.parse_args()
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory() as at:
        folder = make_tiny_model(Path(at) / "tiny", "qwen2", seed=1)
        for batch in map(int, args.batches.split(",")):
            for depth, paths in ((4, 1), (8, 2)):
                found = measure(folder, args.trace, batch, Allowance(depth, paths), profile=args.profile)
                rounded = {name: round(value, 2) for name, value in found.items()}
                print(json.dumps({"batch": batch, "tokens": depth, "paths": paths} | rounded), flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
