# SPDX-License-Identifier: Apache-2.0
"""The other columns of a prompt's row, which TRL does not give to a `rollout_func`: found in the trainer's datasets.

Invariants
  1. A prompt has the row of its own dataset: that of the trainer and the phase, as they are now.
  2. A prompt without a row is refused: a reward or an environment would take its columns for missing.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from seer.errors import ConfigError, InputError
from seer.integrations.trl.groups import PromptGroup, prompt_key

Rows = dict[str, dict[str, Any]]
"""By prompt."""


class DatasetRows:
    """Reads each dataset once."""

    def __init__(self) -> None:
        self._read: dict[str, tuple[Any, Rows]] = {}  # by name: the dataset, and its rows

    def of(self, groups: Sequence[PromptGroup], trainer: Any, mode: str) -> Rows:
        """Rows that hold those of the groups; of a prompt in both datasets, that of the phase."""
        own, other = ("train_dataset", "eval_dataset") if mode == "train" else ("eval_dataset", "train_dataset")
        rows = self._rows(trainer, own)
        if not all(group.key in rows for group in groups):  # `evaluate` takes any dataset
            rows = self._rows(trainer, other) | rows
        for group in groups:
            if group.key not in rows:
                raise InputError(
                    f"a prompt is in neither train_dataset nor eval_dataset: {str(group.prompt)[:80]!r}",
                    hint="rows are found by their prompts: give the dataset to the trainer",
                )
        return rows

    def _rows(self, trainer: Any, name: str) -> Rows:
        dataset = getattr(trainer, name)
        known = self._read.get(name)
        if known is None or known[0] is not dataset:
            known = self._read[name] = dataset, rows_by_prompt(dataset, name)
        return known[1]


def rows_by_prompt(found: Any, name: str) -> Rows:
    """Of a dataset, or several by name, the columns of each row but the prompt."""
    rows: Rows = {}
    datasets = found.values() if isinstance(found, dict) else [] if found is None else [found]
    for dataset in datasets:
        if not hasattr(dataset, "__len__"):
            raise ConfigError(
                f"{name} is a stream, so rows cannot be found by prompt",
                hint="early rewards and environments need a dataset with a length; TRL's own rewards work with streams",
            )
        for row in dataset:
            rest = {column: value for column, value in row.items() if column != "prompt"}
            if rows.setdefault(prompt_key(row["prompt"]), rest) != rest:
                raise InputError(
                    f"{name} holds two rows with the same prompt and different columns: {str(row['prompt'])[:80]!r}",
                    hint="early rewards and environments find a row by its prompt; make prompts unique",
                )
    return rows
