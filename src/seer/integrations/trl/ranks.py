# SPDX-License-Identifier: Apache-2.0
"""One rollout for all ranks: the main rank rolls out all prompts and returns to each rank its own results.

A group can be split over two ranks, and Seer balances better over more prompts; so ranks do not roll out by themselves.

Invariants
  1. Every rank takes part in every exchange, whatever fails: an error of the main rank is raised on all of them.
  2. What a rank gets back answers its own prompts, in its own order.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from seer.errors import SeerError

Columns = dict[str, list[Any]]
"""By name, one value per prompt."""


def roll_out_together(prompts: list[Any], trainer: Any, roll_out: Callable[[list[Any]], Columns]) -> Columns:
    """Call `roll_out` on the main rank with the prompts of all ranks; return this rank's part of the columns."""
    accelerator = trainer.accelerator
    if accelerator.num_processes == 1:
        return roll_out(prompts)
    from accelerate.utils import broadcast_object_list, gather_object  # type: ignore[import-untyped]

    counts: list[int] = gather_object([len(prompts)])
    all_prompts: list[Any] = gather_object(list(prompts))
    staged: list[Any] = [None, None, None]
    own: BaseException | None = None
    if accelerator.is_main_process:
        try:
            staged[0] = roll_out(all_prompts)
        except BaseException as error:  # the other ranks wait for this one and raise it too
            own = error
            staged[1] = f"{type(error).__name__}: {error}"
            staged[2] = error.hint if isinstance(error, SeerError) else None
    broadcast_object_list(staged, from_process=0)
    if own is not None:
        raise own
    if staged[1] is not None:
        raise SeerError(f"the rollout failed on the main rank: {staged[1]}", hint=staged[2])
    first = sum(counts[: accelerator.process_index])
    mine = slice(first, first + len(prompts))
    return {name: values[mine] for name, values in staged[0].items()}
