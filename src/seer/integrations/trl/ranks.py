# SPDX-License-Identifier: Apache-2.0
"""One rollout for all ranks: the main rank rolls out all prompts and returns to each rank its own results.

A group can be split over two ranks, and Seer balances better over more prompts; so ranks do not roll out by themselves.
What the main rank cannot do alone, because tensors are spread over the ranks, it tells the others to take part in.

Waits: the other ranks wait for what the main rank tells them, as long as torch's process group allows (`ddp_timeout`).

Invariants
  1. Every rank takes part in every exchange, whatever fails: an error of the main rank is raised on all of them.
  2. What a rank gets back answers its own prompts, in its own order.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from seer.errors import SeerError

Columns = dict[str, list[Any]]
"""By name, one value per prompt."""

Duties = Mapping[str, Callable[..., None]]
"""By name, what the other ranks do when they are told; each gets the trainer first."""

_DONE = "done"


def roll_out_together(
    prompts: list[Any], trainer: Any, roll_out: Callable[[list[Any]], Columns], duties: Duties
) -> Columns:
    """Call `roll_out` on the main rank with the prompts of all ranks; return this rank's part of the columns."""
    accelerator = trainer.accelerator
    if accelerator.num_processes == 1:
        return roll_out(prompts)
    from accelerate.utils import gather_object  # type: ignore[import-untyped]

    counts: list[int] = gather_object([len(prompts)])
    all_prompts: list[Any] = gather_object(list(prompts))
    columns = _lead(all_prompts, roll_out) if accelerator.is_main_process else _follow(trainer, duties)
    first = sum(counts[: accelerator.process_index])
    mine = slice(first, first + len(prompts))
    return {name: values[mine] for name, values in columns.items()}


def tell_others(trainer: Any, duty: str, *arguments: Any) -> None:
    """On the main rank, while it rolls out: the others do this duty now, and this rank must do its part of it."""
    if trainer.accelerator.num_processes > 1:
        _tell(duty, *arguments)


def _lead(all_prompts: list[Any], roll_out: Callable[[list[Any]], Columns]) -> Columns:
    try:
        columns = roll_out(all_prompts)
    except BaseException as error:  # the other ranks wait for this one and raise it too
        _tell(_DONE, None, f"{type(error).__name__}: {error}", error.hint if isinstance(error, SeerError) else None)
        raise
    _tell(_DONE, columns, None, None)
    return columns


def _follow(trainer: Any, duties: Duties) -> Columns:
    from accelerate.utils import broadcast_object_list

    while True:
        told: list[Any] = [None, None]
        broadcast_object_list(told, from_process=0)
        duty, arguments = told
        if duty == _DONE:
            break
        duties[duty](trainer, *arguments)
    columns, error, hint = arguments
    if error is not None:
        raise SeerError(f"the rollout failed on the main rank: {error}", hint=hint)
    found: Columns = columns
    return found


def _tell(duty: str, *arguments: Any) -> None:
    from accelerate.utils import broadcast_object_list

    broadcast_object_list([duty, arguments], from_process=0)
