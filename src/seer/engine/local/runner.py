# SPDX-License-Identifier: Apache-2.0
"""Run a planned step: forward pass and sampling.

`PlainRunner` is the specification and is used on CPUs: one forward pass, then sampling. gpu_runner.py replays captured
graphs, and where nothing can interfere it runs several decoding steps before the host looks at the results (a burst).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol

import torch

from seer.drafting.base import Allowance, DraftSession
from seer.engine.local.batch import Work, build
from seer.engine.local.batch_scheduler import BatchScheduler
from seer.engine.local.model import Model
from seer.engine.local.sampling import SampleRow, Samples, sample

if TYPE_CHECKING:  # the native module is needed on GPUs only
    from seer.engine.local._draft_burst import BurstChunk


class Runner(Protocol):
    """Computes what the scheduler planned."""

    def run(self, works: list[Work]) -> Samples:
        """Compute `works` and sample; fill in `first_sample` and `node_slots` of each."""

    def burst_length(self, works: Sequence[Work]) -> int:
        """Steps to run at once for these chunks, with drafts or without; 1 where bursts do not help."""

    def burst(self, works: Sequence[Work], num_steps: int) -> list[Samples]:
        """Decode `num_steps` tokens of every chunk in `works`; return one `Samples` per step.

        Stop tokens and limits are ignored: the caller drops the tokens after them.
        """

    @property
    def num_captured(self) -> int:
        """Graphs captured so far."""

    def run_drafted(
        self, works: Sequence[Work], session: DraftSession, allowance: Allowance, *, until_one_ends: bool
    ) -> DraftedSteps:
        """Run a burst of steps with drafts, until a chunk ends if `until_one_ends`; close `session`."""


@dataclass(frozen=True, slots=True)
class DraftedSteps:
    """The results of several steps with drafts."""

    chunks: Sequence[BurstChunk]
    """One for each work."""
    num_steps: int
    num_batched_tokens: int
    """Of all steps."""
    num_near_ties: int


class PlainRunner:
    """One forward pass, then sampling. Implements `Runner`."""

    num_captured = 0
    """A CPU captures no graphs."""

    def __init__(self, model: Model, scheduler: BatchScheduler) -> None:
        self.model, self.scheduler = model, scheduler

    def run(self, works: list[Work]) -> Samples:
        """Compute and sample."""
        cache = self.scheduler.cache
        batch = build(works, cache.block_size, cache.first_scratch_slot)
        logits: torch.Tensor = self.model.forward(batch, self.scheduler.tables)
        return sample(logits, sample_rows(works))

    def burst_length(self, works: Sequence[Work]) -> int:
        """1: on a CPU, computing takes much longer than planning."""
        return 1

    def burst(self, works: Sequence[Work], num_steps: int) -> list[Samples]:
        """Never called, because `burst_length` is 1."""
        raise NotImplementedError

    def run_drafted(
        self, works: Sequence[Work], session: DraftSession, allowance: Allowance, *, until_one_ends: bool
    ) -> DraftedSteps:
        """Never called, because `burst_length` is 1."""
        raise NotImplementedError


def sample_rows(works: Sequence[Work]) -> list[SampleRow]:
    """Sampling parameters of each row that is sampled from, in the batch's order."""
    rows: list[SampleRow] = []
    for work in works:
        if not work.samples:
            continue
        chunk, position = work.active.chunk, len(work.active.tokens)
        for depth in (0, *(work.tree.depths() if work.tree else ())):
            early = work.active.num_sampled + depth < chunk.sampling.min_tokens
            cut = work.active.stop_ids if early else frozenset()
            rows.append(SampleRow(chunk.sampling, chunk.seed, position + depth, cut))
    return rows
