"""Who carries out a planned step: the model's forward pass and the sample, in whatever way its device does
best.

`PlainRunner` is the specification and serves CPUs: one forward pass, one sample. gpu_runner.py replays captured
graphs and, where nothing can interfere, several decoding steps without asking the host in between (a burst).
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

if TYPE_CHECKING:  # a CPU needs none
    from seer.engine.local._draft_burst import BurstChunk


class Runner(Protocol):
    """Computes what the scheduler planned."""

    def run(self, works: list[Work]) -> Samples:
        """Compute the rows of `works` and sample; fills in `first_sample` and `node_slots` of each."""

    def burst_length(self, works: Sequence[Work]) -> int:
        """Steps worth making in one go for these chunks, with drafts or without; 1 where there is nothing to gain."""

    def burst(self, works: Sequence[Work], num_steps: int) -> list[Samples]:
        """Decode every chunk of `works` by `num_steps` tokens, one `Samples` per step.

        Neither stop tokens nor limits are noticed on the way: the caller drops what comes after them.
        """

    @property
    def num_captured(self) -> int:
        """Graphs captured so far."""

    def run_drafted(
        self, works: Sequence[Work], session: DraftSession, allowance: Allowance, *, until_one_ends: bool
    ) -> DraftedSteps:
        """Draft, verify and draft again, a few times or until a chunk has ended; closes `session`."""


@dataclass(frozen=True, slots=True)
class DraftedSteps:
    """Several steps with drafts, and what came of them."""

    chunks: Sequence[BurstChunk]
    """One for each work."""
    num_steps: int
    num_batched_tokens: int
    """Of all steps."""
    num_near_ties: int


class PlainRunner:
    """One forward pass, one sample."""

    num_captured = 0

    def __init__(self, model: Model, scheduler: BatchScheduler) -> None:
        self.model, self.scheduler = model, scheduler

    def run(self, works: list[Work]) -> Samples:
        """Compute and sample."""
        cache = self.scheduler.cache
        batch = build(works, cache.block_size, cache.first_scratch_slot)
        logits: torch.Tensor = self.model.forward(batch, self.scheduler.tables)
        return sample(logits, sample_rows(works))

    def burst_length(self, works: Sequence[Work]) -> int:
        """A CPU computes for longer than it is told what to do: nothing to gain."""
        return 1

    def burst(self, works: Sequence[Work], num_steps: int) -> list[Samples]:
        """Never asked."""
        raise NotImplementedError

    def run_drafted(
        self, works: Sequence[Work], session: DraftSession, allowance: Allowance, *, until_one_ends: bool
    ) -> DraftedSteps:
        """Never asked."""
        raise NotImplementedError


def sample_rows(works: Sequence[Work]) -> list[SampleRow]:
    """How each sampled row is sampled from, in the order of the batch's sampled rows."""
    rows: list[SampleRow] = []
    for work in works:
        if not work.samples:
            continue
        chunk, position = work.active.chunk, len(work.active.tokens)
        for depth in (0, *(work.tree.depths() if work.tree else ())):
            early = work.active.num_response + depth < chunk.sampling.min_tokens
            cut = work.active.stop_ids if early else frozenset()
            rows.append(SampleRow(chunk.sampling, chunk.seed, position + depth, cut))
    return rows
