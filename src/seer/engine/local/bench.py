# SPDX-License-Identifier: Apache-2.0
"""Measure an engine: the cost of a step of a given shape, and tokens per second of a whole batch.

Step costs are measured on contexts that were never computed (their KV is zeros). A step takes equally long for any
values, and this way a grid of shapes takes seconds instead of minutes.
"""

from __future__ import annotations

import random
import statistics
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import torch

from seer.drafting.base import Allowance, DraftAsk, DraftBudget, DraftTree
from seer.engine.local.assembly import EngineSettings, assemble, choose_dtype, choose_limits
from seer.engine.local.engine import Engine
from seer.engine.local.model_config import read_config
from seer.engine.profiles import versions
from seer.errors import ConfigError
from seer.speculation.step_profile import ProfilePoint, StepProfile
from seer.speculation.step_report import StepReport
from seer.types import Chunk, Sampling

WARMUP_STEPS = 3
"""Not timed: the first steps of a shape compile kernels and touch memory for the first time."""


@dataclass(frozen=True, slots=True)
class Throughput:
    """One run of a batch from prompts to the end."""

    batch: int
    num_tokens: int
    wall_s: float
    cpu_s: float
    step_s: float
    """Median decoding step, wall time."""

    @property
    def tokens_per_s(self) -> float:
        """Generated tokens per second of wall time."""
        return self.num_tokens / self.wall_s


class _BlindDrafter:
    """Proposes arbitrary tokens. The cost of verification does not depend on the tokens."""

    def __init__(self, vocab_size: int) -> None:
        self.vocab_size = vocab_size

    def observe(self, group: int, request: int, tokens: Sequence[int], *, start: int) -> None:
        """Learn nothing."""

    def draft(self, asks: Sequence[DraftAsk]) -> list[DraftTree]:
        """A path of the largest size allowed."""
        return [
            DraftTree.linear([(len(ask.context) + 7 * i) % self.vocab_size for i in range(ask.max_tokens)])
            for ask in asks
        ]

    def forget(self, request: int) -> None:
        """Nothing to forget."""


def profile(
    folder: Path,
    *,
    batches: Sequence[int],
    tokens_per_request: Sequence[int],
    contexts: Sequence[int],
    num_steps: int = 10,
    device: str = "cpu",
    dtype: str = "auto",
    block_size: int = 16,
) -> StepProfile:
    """Measure every combination."""
    config = read_config(folder)
    on_device = torch.device(device)
    # If every draft were accepted, each step would add all its tokens.
    growth = (num_steps + WARMUP_STEPS + 1) * max(tokens_per_request)
    if max(contexts) + growth > config.max_model_len:
        raise ConfigError(
            f"{max(contexts)} tokens and {growth} more exceed the model's {config.max_model_len}",
            hint="measure shorter contexts or fewer steps",
        )
    points = []
    for batch in batches:
        depth = [1]
        steps: list[StepReport] = []
        settings = EngineSettings(
            dtype=choose_dtype(dtype, on_device),
            device=on_device,
            max_step_tokens=max(512, batch * max(tokens_per_request)),
            drafter=_BlindDrafter(config.vocab_size),
            budget=_fixed(depth),
            on_step=steps.append,
        )
        limits = choose_limits(
            config,
            settings,
            block_size=block_size,
            max_num_seqs=batch,
            kv_blocks=batch * (-(-(max(contexts) + growth) // block_size)),
        )
        engine = assemble(0, folder, config, limits, settings)
        for context in contexts:
            for tokens in tokens_per_request:
                depth[0] = tokens
                steps.clear()
                _time_steps(engine, batch, context, num_steps + WARMUP_STEPS, growth)
                points.append(_point(batch, tokens, context, steps[WARMUP_STEPS:]))
    return StepProfile(
        model=folder.name,
        device=device,
        dtype=str(choose_dtype(dtype, on_device)).removeprefix("torch."),
        points=tuple(points),
        versions=versions(),
    )


def _point(batch: int, tokens: int, context: int, steps: Sequence[StepReport]) -> ProfilePoint:
    times = sorted(step.duration_s for step in steps)
    quartile = len(times) // 4
    spread_s = times[-1 - quartile] - times[quartile]
    return ProfilePoint(batch, tokens, context, statistics.median(times), len(times), spread_s)


def _fixed(depth: list[int]) -> DraftBudget:
    """A budget that always allows `depth[0]` tokens per request."""
    return lambda batch: Allowance(depth[0] - 1)


def generate_batch(
    engine: Engine, prompts: Sequence[Sequence[int]], num_tokens: int, *, temperature: float
) -> Throughput:
    """Generate exactly `num_tokens` for each prompt, in one batch, with an empty cache."""
    steps: list[StepReport] = []
    engine.on_step = steps.append
    sampling = Sampling(max_tokens=num_tokens, temperature=temperature, ignore_eos=True)
    wall, cpu = time.perf_counter(), time.process_time()
    with torch.inference_mode():
        for request, prompt in enumerate(prompts):
            engine.add(_chunk(request, prompt, num_tokens, sampling))
        total = 0
        while engine.busy:
            total += sum(output.num_tokens for output in engine.step())
    wall, cpu = time.perf_counter() - wall, time.process_time() - cpu
    decode = [step.duration_s for step in steps if not step.num_prefill_tokens] or [0.0]
    return Throughput(len(prompts), total, wall, cpu, statistics.median(decode))


def random_prompts(count: int, length: int, vocab_size: int, seed: int = 0) -> list[list[int]]:
    """Prompts without common prefixes, so that no cached KV is reused."""
    dice = random.Random(seed)
    return [[dice.randrange(vocab_size) for _ in range(length)] for _ in range(count)]


def _chunk(request: int, prompt: Sequence[int], num_tokens: int, sampling: Sampling) -> Chunk:
    return Chunk(
        request=request,
        group=request,
        attempt=1,
        num_prompt_tokens=len(prompt),
        num_generated_tokens=0,
        max_tokens=num_tokens,
        sampling=sampling,
        seed=request,
        weights_version=0,
        prompt=list(prompt),
    )


def _time_steps(engine: Engine, batch: int, context: int, num_steps: int, growth: int) -> None:
    """Decode on contexts that are only marked as computed."""
    sampling = Sampling(max_tokens=growth, ignore_eos=True)
    prompts = random_prompts(batch, context, engine.model.config.vocab_size, seed=context)
    with torch.inference_mode():
        for request, prompt in enumerate(prompts):
            engine.add(_chunk(request, prompt, growth, sampling))
        engine.scheduler.plan()
        for active in engine.scheduler.running:
            active.num_computed = context - 1
            active.num_sealed = active.num_computed // engine.scheduler.cache.block_size
        for _ in range(num_steps):
            engine.step()
        for request in range(batch):
            engine.abort(request)
        engine.scheduler.blocks.forget_all()
