# SPDX-License-Identifier: Apache-2.0
"""Which GPUs each instance gets; pure.

GPUs are numbered as CUDA shows them to this process: with `CUDA_VISIBLE_DEVICES=4,5` GPU 0 is the machine's fifth.

Invariant: two instances have a GPU in common only where sharing was asked for.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence

from seer.errors import ConfigError

VISIBLE = "CUDA_VISIBLE_DEVICES"
"""The variable with which CUDA shows a process some GPUs of the machine."""


MAX_GPU = 4095
"""No process sees more; a range beyond it would be a list without end."""


def parse_gpus(text: str) -> tuple[int, ...]:
    """`0,1,4-7` as numbers."""
    found: list[int] = []
    for word in text.replace(" ", "").split(","):
        match = re.fullmatch(r"([0-9]{1,9})(?:-([0-9]{1,9}))?", word)
        if match is None:
            raise ConfigError(f"gpus={shortened(text)}", hint="numbers and ranges, as 0,1,4-7")
        first, last = int(match[1]), int(match[2] or match[1])
        refuse_repeated((last,))
        if last < first:
            raise ConfigError(f"gpus={shortened(text)}", hint=f"a range goes upwards: {last}-{first}")
        found += range(first, last + 1)
        if len(found) > MAX_GPU + 1:
            break  # repeated
    refuse_repeated(found)
    return tuple(found)


def refuse_repeated(gpus: Sequence[int]) -> None:
    """Refuse an empty list, numbers that no GPU has, and a GPU that is named twice."""
    if not gpus or min(gpus) < 0 or max(gpus) > MAX_GPU or len(set(gpus)) != len(gpus):
        shown = shortened(",".join(map(str, gpus[:64])))
        raise ConfigError(f"gpus={shown}", hint=f"name each GPU once, by a number from 0 to {MAX_GPU:,}")


def shortened(text: str) -> str:
    """A list as its user wrote it, for a message."""
    return repr(text if len(text) <= 60 else f"{text[:57]}...")


def assign_gpus(
    gpus: Sequence[int], num_instances: int, gpus_each: int = 1, *, share: bool = False
) -> list[tuple[int, ...]]:
    """The GPUs of each instance, `gpus_each` in a row; `share` lets instances take turns where there are too few."""
    groups = [tuple(gpus[at : at + gpus_each]) for at in range(0, len(gpus) - gpus_each + 1, gpus_each)]
    if not groups or (len(groups) < num_instances and not share):
        raise ConfigError(_too_few(gpus, num_instances, gpus_each), hint=_way_out(len(groups), gpus_each))
    return [groups[instance % len(groups)] for instance in range(num_instances)]


def assign_more_gpus(
    used: Mapping[int, int], gpus: Sequence[int], num_instances: int, gpus_each: int = 1, *, share: bool = False
) -> list[tuple[int, ...]]:
    """The GPUs of instances that join others, which `used` counts by GPU: free ones, or those with the fewest."""
    if share:
        return assign_gpus(sorted(gpus, key=lambda gpu: used.get(gpu, 0)), num_instances, gpus_each, share=True)
    free = [gpu for gpu in gpus if not used.get(gpu)]
    if len(free) < num_instances * gpus_each:
        names = f" ({', '.join(map(str, free))})" if free else ""
        more = "1 more instance needs" if num_instances == 1 else f"{num_instances} more instances need"
        raise ConfigError(
            f"{more} {num_instances * gpus_each} GPU(s), {len(free)} of {len(gpus)} are free{names}",
            hint="remove_instances gives GPUs back, gpus=[...] names others, and share_gpus lets instances share one",
        )
    return assign_gpus(free, num_instances, gpus_each)


def _too_few(gpus: Sequence[int], num_instances: int, gpus_each: int) -> str:
    each = f" of {gpus_each} GPUs each" if gpus_each > 1 else ""
    names = f" ({', '.join(map(str, gpus))})" if gpus else ""
    asked = f"{num_instances} instance{'s' if num_instances > 1 else ''}{each}"
    needed = num_instances * gpus_each
    verb, noun = "needs" if num_instances == 1 else "need", "GPU" if needed == 1 else "GPUs"
    return f"{asked} {verb} {needed} {noun}, got {len(gpus)}{names}"


def _way_out(num_groups: int, gpus_each: int) -> str:
    if num_groups:
        return f"instances={num_groups}, more gpus, or share_gpus to put several instances on a GPU"
    if gpus_each > 1:
        return "a smaller tensor_parallel, or more gpus"
    return f"device='cpu', or a GPU that {VISIBLE} shows"


def refuse_invisible(gpus: Sequence[int], num_visible: int) -> None:
    """Refuse a GPU that this process does not see."""
    missing = [gpu for gpu in gpus if gpu >= num_visible]
    if missing:
        raise ConfigError(
            f"there is no GPU {', '.join(map(str, missing))}: {num_visible} are visible",
            hint=f"`nvidia-smi -L` lists them; {VISIBLE} hides and renumbers them",
        )


def visible_value(gpus: Sequence[int], own: str | None) -> str:
    """CUDA_VISIBLE_DEVICES for a child that gets these GPUs, where this process has `own`; names may be UUIDs."""
    names = [name.strip() for name in own.split(",")] if own else []
    return ",".join(names[gpu] if names else str(gpu) for gpu in gpus)
