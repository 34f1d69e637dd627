# SPDX-License-Identifier: Apache-2.0
"""Sizes of the drafts of a simulated instance's batch, and the tokens its requests gain per step with them.

Sizes are chosen by `SpeculationModel`, again and again as the batch changes.

Invariants
  1. Without speculation every request gains 1 token per step.
  2. Between two reviews the sizes stay, and every request that enters gets the present ones.
"""

from __future__ import annotations

import math
from functools import lru_cache

from seer.sim.chunk_run import ChunkRun
from seer.sim.costs import InstanceCost
from seer.sim.decode_batch import DecodeBatch
from seer.sim.speculation import GroupProgress, Sizes, SpeculationModel, acceptance_at
from seer.speculation.throughput import NO_DRAFT, DraftSize

DEPTH_REVIEW_S = 20.0
"""Sizes of drafts are chosen again at least this often, and when the batch has changed by an eighth. More often would
cost simulation time: every choice changes the rate of every request."""


@lru_cache(maxsize=65536)
def _rate(acceptance: float, size: DraftSize) -> float:
    """Tokens a request gains per step."""
    return acceptance_at(acceptance).gain(size)


class DraftDepths:
    """The sizes of drafts of one instance."""

    def __init__(self, cost: InstanceCost, speculation: SpeculationModel | None, progress: GroupProgress) -> None:
        self._cost = cost
        self._speculation = speculation
        self._progress = progress
        self._sizes = Sizes(NO_DRAFT, NO_DRAFT)
        self._reviewed_batch = 0
        self._reviewed_s = -math.inf

    @property
    def next_review_s(self) -> float:
        """When the sizes for a batch that does not change are chosen again; never without speculation."""
        return math.inf if self._speculation is None else self._reviewed_s + DEPTH_REVIEW_S

    def rate(self, run: ChunkRun) -> float:
        """Tokens per step of a request that starts to decode now."""
        if self._speculation is None:
            return 1.0
        return _rate(self._speculation.acceptance(self._progress, run.chunk.group), self._size(run))

    def mean_drafted(self, batch: DecodeBatch) -> float:
        """Draft tokens per running request and step."""
        num_running, num_probes = len(batch), batch.num_probes
        if not num_running:
            return 0.0
        drafted = num_probes * self._sizes.probes.tokens + (num_running - num_probes) * self._sizes.others.tokens
        return drafted / num_running

    def review(self, batch: DecodeBatch, now_s: float) -> None:
        """Choose sizes again when the batch has changed enough, or after `DEPTH_REVIEW_S`; set all rates."""
        if self._speculation is None or not batch.running:
            return
        num_running = len(batch)
        steady = abs(num_running - self._reviewed_batch) * 8 <= self._reviewed_batch
        if steady and now_s < self._reviewed_s + DEPTH_REVIEW_S:
            return
        self._reviewed_s, self._reviewed_batch = now_s, num_running
        rates = {
            group: self._speculation.acceptance(self._progress, group)
            for group in {run.chunk.group for run in batch.running.values()}
        }
        mean = sum(rates[run.chunk.group] for run in batch.running.values()) / num_running
        self._sizes = self._speculation.sizes(
            self._cost, batch.num_probes, num_running - batch.num_probes, batch.context_tokens, round(mean, 3)
        )
        probes = {group: _rate(rate, self._sizes.probes) for group, rate in rates.items()}
        others = {group: _rate(rate, self._sizes.others) for group, rate in rates.items()}
        batch.set_rates(lambda chunk: (probes if chunk.is_probe else others)[chunk.group])

    def _size(self, run: ChunkRun) -> DraftSize:
        return self._sizes.probes if run.chunk.is_probe else self._sizes.others
