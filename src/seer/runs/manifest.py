# SPDX-License-Identifier: Apache-2.0
"""run.json as types: whatever reads one gets numbers where numbers belong and text where text does.

Writers may add fields; readers leave those they do not know alone. A field that is here has the type that is here, or
the file is refused with the field's name.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import asdict
from typing import Annotated, Any, Literal

import msgspec

from seer.ranges import INT64_MAX
from seer.types import InstanceLimits

MAX_INSTANCES = 4096
"""Readers simulate each instance; no run has so many."""

Count = Annotated[int, msgspec.Meta(ge=0, le=INT64_MAX)]
Positive = Annotated[int, msgspec.Meta(ge=1, le=INT64_MAX)]
Number = int | float | None
SCHEDULER_NAME = re.compile(r"[a-z0-9][a-z0-9+-]*")
"""Of a scheduler whose run is a folder of that name inside a comparison's."""


class Options(msgspec.Struct, frozen=True, kw_only=True):
    """The facts of a run that reports show."""

    instances: Annotated[int, msgspec.Meta(ge=1, le=MAX_INSTANCES)]
    scheduler: str = "run"
    model: str | None = None
    engine: str | None = None
    pool: str | None = None
    chunk_tokens: Positive | None = None
    max_tokens: Positive | None = None


class Machine(msgspec.Struct, frozen=True, kw_only=True):
    """The machine that a run was measured on."""

    cpu: str = ""
    cores: Positive | None = None


class Limits(msgspec.Struct, frozen=True, kw_only=True):
    """`InstanceLimits` as run.json keeps them."""

    kv_blocks: Positive
    block_size: Positive
    max_num_seqs: Positive
    max_model_len: Positive

    def as_limits(self) -> InstanceLimits:
        """The limits of each instance."""
        return InstanceLimits(**msgspec.structs.asdict(self))


def recorded_limits(limits: Sequence[InstanceLimits]) -> dict[str, Any]:
    """The fields of run.json for instances with these limits: one for all, and each one's where they differ."""
    each = [asdict(one) for one in limits]
    return {"limits": each[0]} if len(set(limits)) == 1 else {"limits": each[0], "instance_limits": each}


class VerificationNumbers(msgspec.Struct, frozen=True, kw_only=True):
    """What a verification found, as far as reports show it."""

    is_clean: bool
    num_responses: Count


class Manifest(msgspec.Struct, frozen=True, kw_only=True):
    """run.json."""

    command: Literal["rollout", "compare", "train"]
    options: Options
    config: dict[str, Any] | None = None
    """The whole configuration; `seer.config.build_run` checks it. A trainer's run has none."""
    machine: Machine = Machine()
    status: str = ""
    limits: Limits | None = None
    """Of each instance, or of the first one where they differ; None if none had started."""
    instance_limits: list[Limits] = []
    """Of each instance, where they differ."""
    model_dir: str | None = None
    forced_lengths: bool = False
    summary: dict[str, Number] | None = None
    verification: VerificationNumbers | None = None
    rows: list[dict[str, str | Number]] = []
    """Of a comparison: a scheduler's name and its numbers."""

    def __post_init__(self) -> None:
        """A row's scheduler is a part of its folder's name, so it names no other place; all else is a number."""
        for row in self.rows:
            name = row.get("scheduler")
            if not isinstance(name, str) or not SCHEDULER_NAME.fullmatch(name):
                raise ValueError(f"a row of the scheduler {name!r}")
            text = [key for key, value in row.items() if key != "scheduler" and isinstance(value, str)]
            if text:
                raise ValueError(f"{text[0]} of {name} is text: {row[text[0]]!r}")

    def limits_of_all(self, num_instances: int) -> list[Limits]:
        """Of so many instances; those that joined the run are taken to be as the first. None had started: empty."""
        if self.limits is None:
            return []
        known = self.instance_limits[:num_instances]
        return known + [self.limits] * (num_instances - len(known))

    def schedulers(self) -> list[str]:
        """The schedulers of a comparison, in the order of its rows."""
        return [str(row["scheduler"]) for row in self.rows]

    def number(self, name: str) -> float:
        """A number of the summary; 0 where it has none."""
        return (self.summary or {}).get(name) or 0
