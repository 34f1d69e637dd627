"""Who carries out a planned step: the model's forward pass and the draw, in whatever way its device does
best.

`PlainRunner` is the specification and serves CPUs: one forward pass, one draw. gpu_runner.py replays captured
graphs and, where nothing can interfere, several decoding steps without asking the host in between (a burst).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol

import torch

from seer.engine.drafter import Allowance, Following
from seer.engine.local.batch import Work, build
from seer.engine.local.model import Model
from seer.engine.local.sampling import DrawRow, Draws, draw
from seer.engine.local.scheduler import Scheduler

if TYPE_CHECKING:  # a CPU needs none
    from seer.engine.local._draft_burst import BurstChunk


class Runner(Protocol):
    """Computes what the scheduler planned."""

    def run(self, works: list[Work]) -> Draws:
        """Compute the rows of `works` and draw; fills in `first_draw` and `node_slots` of each."""

    def burst_length(self, works: Sequence[Work]) -> int:
        """Steps worth making in one go for these chunks, with drafts or without; 1 where there is nothing to gain."""

    def burst(self, works: Sequence[Work], num_steps: int) -> list[Draws]:
        """Decode every chunk of `works` by `num_steps` tokens, one `Draws` per step.

        Neither stop tokens nor limits are noticed on the way: the caller drops what comes after them.
        """

    @property
    def num_captured(self) -> int:
        """Graphs captured so far."""

    def follow(
        self, works: Sequence[Work], following: Following, allowance: Allowance, *, until_one_ends: bool
    ) -> DraftedSteps:
        """Draft, verify and draft again, a few times or until a chunk has ended; closes `following`."""


@dataclass(frozen=True, slots=True)
class DraftedSteps:
    """Several steps with drafts, and what came of them."""

    said: Sequence[BurstChunk]
    """One for each work."""
    num_steps: int
    num_rows: int
    """Of all steps."""
    num_near_ties: int


class PlainRunner:
    """One forward pass, one draw."""

    num_captured = 0

    def __init__(self, model: Model, scheduler: Scheduler) -> None:
        self.model, self.scheduler = model, scheduler

    def run(self, works: list[Work]) -> Draws:
        """Compute and draw."""
        cache = self.scheduler.cache
        batch = build(works, cache.block_tokens, cache.first_scratch_slot)
        logits: torch.Tensor = self.model.forward(batch, self.scheduler.tables)
        return draw(logits, draw_rows(works))

    def burst_length(self, works: Sequence[Work]) -> int:
        """A CPU computes for longer than it is told what to do: nothing to gain."""
        return 1

    def burst(self, works: Sequence[Work], num_steps: int) -> list[Draws]:
        """Never asked."""
        raise NotImplementedError

    def follow(
        self, works: Sequence[Work], following: Following, allowance: Allowance, *, until_one_ends: bool
    ) -> DraftedSteps:
        """Never asked."""
        raise NotImplementedError


def draw_rows(works: Sequence[Work]) -> list[DrawRow]:
    """How each drawn row is drawn from, in the order of the batch's drawn rows."""
    rows: list[DrawRow] = []
    for work in works:
        if not work.draws:
            continue
        chunk, position = work.active.chunk, len(work.active.tokens)
        for depth in (0, *(work.tree.depths() if work.tree else ())):
            early = work.active.num_response + depth < chunk.sampling.min_tokens
            cut = work.active.stop_ids if early else frozenset()
            rows.append(DrawRow(chunk.sampling, chunk.seed, position + depth, cut))
    return rows
