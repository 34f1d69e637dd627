"""Draft, verify, draft again: several steps of the same chunks in one go.

Between two steps the host does what a step cannot begin without, for all chunks in a few native calls: it walks down
the trees (csrc/engine/draft_burst.h), tells the index, has new trees drafted and lays them out. Everything else, block
keys and reports and whatever is Python's for each chunk, waits for the end. A device that computes for two
milliseconds would otherwise wait for one.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from seer.drafting.base import Allowance, DraftSession
from seer.engine.local._draft_burst import DraftBurst
from seer.engine.local.batch import Work
from seer.engine.local.batch_scheduler import BatchScheduler
from seer.engine.local.graph_shapes import Shape
from seer.engine.local.runner import DraftedSteps
from seer.engine.local.sampling import NEAR_TIE

NO_MOVE = -1
"""In the place of a slot whose KV is to be moved."""


class Step(Protocol):
    """Computes rows and samples from them."""

    told: NDArray[np.int32]
    """To be filled in: six fields of every row, then the slots that KV is moved from before, then those it is moved
    to."""

    def run(self) -> NDArray[np.float32]:
        """What was sampled, as `sampling.unpack` has it."""


def run_drafted_steps(
    works: Sequence[Work],
    session: DraftSession,
    allowance: Allowance,
    *,
    scheduler: BatchScheduler,
    choose: Callable[[int, int], tuple[Shape, Step]],
    move: Callable[[list[int], list[int]], None],
    max_steps: int,
    until_one_ends: bool,
) -> DraftedSteps:
    """As many steps as are allowed, or fewer where chunks end; `choose` answers to chunks and rows for each."""
    cache, tables = scheduler.cache, scheduler.tables.numpy()
    burst = DraftBurst(
        block_size=cache.block_size,
        first_scratch_slot=cache.first_scratch_slot,
        spare_seq_slot=len(tables),
        spare_slot=cache.spare_slot,
    )
    for active in (work.active for work in works):
        burst.add(
            seq_slot=active.seq_slot,
            root=active.num_computed,
            token=active.tokens[-1],
            remaining=active.num_remaining,
            stop_ids=list(active.stop_ids),
        )
    enough = len(works) if until_one_ends else 1
    most = allowance.max_tokens
    limits, offsets = np.empty(len(works), np.int32), np.empty(len(works) + 1, np.int64)
    tokens = np.empty(len(works) * (1 + most), np.int32)
    num_steps = num_batched_tokens = 0
    while num_steps < min(max_steps, allowance.max_steps or max_steps) and burst.num_live >= enough:
        burst.limit(most, limits)
        trees = session.draft(limits)
        shape, step = choose(burst.num_live, 1 + int(trees.counts.max()))
        num_batched_tokens += burst.num_live + int(trees.counts.sum())
        num_steps += 1
        while not burst.lay_out(*trees, tables, *shape, shape.num_nodes, step.told):
            move(*burst.take_moves())  # the step before was larger: more KV is to be moved than fits into this one
        burst.settle(step.run(), tables, NEAR_TIE, tokens, offsets)
        session.observe(tokens[: offsets[-1]], offsets)
    moves = burst.take_moves()
    if moves[0]:
        move(*moves)
    session.close(burst.tried, burst.taken)
    return DraftedSteps([burst[at] for at in range(len(works))], num_steps, num_batched_tokens, burst.num_near_ties)
