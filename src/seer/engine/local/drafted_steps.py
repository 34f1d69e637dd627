# SPDX-License-Identifier: Apache-2.0
"""Draft, verify, draft again: several steps of the same chunks without returning to the engine.

Between two steps the host does only what the next step needs, for all chunks in a few native calls: it walks down the
trees (csrc/engine/draft_burst.h), adds the new tokens to the index, drafts new trees and lays them out. All Python work
per chunk, such as block keys and reports, is done once after the last step. Otherwise a device that computes for two
milliseconds would wait for one.
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
"""Stands for "nothing to move" in the list of slots to move KV from; valid slots are 0 or more."""


class Step(Protocol):
    """Computes batched tokens and samples from each."""

    inputs: NDArray[np.int32]
    """Filled in before `run`: six fields of every batched token, then the slots that KV is moved from before the step,
    then the slots it is moved to."""

    def run(self) -> NDArray[np.float32]:
        """The sampled tokens, in the form that `sampling.unpack` reads."""


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
    """Run up to `max_steps` steps, fewer if chunks end.

    `choose` returns the shape and step for a number of chunks and of tokens per chunk.
    """
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
            remaining=active.num_room,
            stop_ids=list(active.stop_ids),
        )
    enough = len(works) if until_one_ends else 1
    mosts = np.array([allowance.tokens_for(work.active.chunk.is_probe) for work in works], np.int32)
    limits, offsets = np.empty(len(works), np.int32), np.empty(len(works) + 1, np.int64)
    tokens = np.empty(len(works) * (1 + allowance.most), np.int32)
    num_steps = num_batched_tokens = 0
    while num_steps < min(max_steps, allowance.max_steps or max_steps) and burst.num_live >= enough:
        burst.limit(mosts, limits)
        trees = session.draft(limits)
        shape, step = choose(burst.num_live, 1 + int(trees.counts.max()))
        num_batched_tokens += burst.num_live + int(trees.counts.sum())
        num_steps += 1
        while not burst.lay_out(*trees, tables, *shape, shape.num_nodes, step.inputs):
            move(*burst.take_moves())  # the step before was larger: it left more moves than fit into this one
        burst.settle(step.run(), tables, NEAR_TIE, tokens, offsets)
        session.observe(tokens[: offsets[-1]], offsets)
    moves = burst.take_moves()
    if moves[0]:
        move(*moves)
    session.close(burst.tried, burst.taken)
    return DraftedSteps([burst[at] for at in range(len(works))], num_steps, num_batched_tokens, burst.num_near_ties)
