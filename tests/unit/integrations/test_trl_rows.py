# SPDX-License-Identifier: Apache-2.0
"""Rows of prompts: from the trainer and the dataset at hand, and never a wrong one or none."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from seer.errors import ConfigError, InputError
from seer.integrations.trl.dataset_rows import DatasetRows
from seer.integrations.trl.groups import find_groups, prompt_key


def a_trainer(train: Any, evaluation: Any = None) -> Any:
    return SimpleNamespace(train_dataset=train, eval_dataset=evaluation)


def a_dataset(answer: int, *prompts: str) -> list[dict[str, Any]]:
    return [{"prompt": prompt, "answer": answer} for prompt in prompts]


def answer(rows: DatasetRows, trainer: Any, mode: str, prompt: str) -> int:
    found: int = rows.of(find_groups([prompt], 1), trainer, mode)[prompt_key(prompt)]["answer"]
    return found


def test_a_prompt_in_both_datasets_has_the_row_of_the_phase() -> None:
    rows, trainer = DatasetRows(), a_trainer(a_dataset(1, "a", "b"), {"one": a_dataset(2, "a"), "two": []})
    assert [answer(rows, trainer, mode, "a") for mode in ("train", "eval")] == [1, 2]
    assert answer(rows, trainer, "eval", "b") == 1, "evaluate(eval_dataset=train_dataset)"


def test_another_trainer_has_rows_of_its_own() -> None:
    rows = DatasetRows()
    assert [answer(rows, a_trainer(a_dataset(number, "a")), "train", "a") for number in (1, 2)] == [1, 2]


def test_a_prompt_without_a_row_is_refused() -> None:
    for trainer in (a_trainer(a_dataset(1, "a")), a_trainer(a_dataset(1, "a"), a_dataset(1, "a"))):
        with pytest.raises(InputError, match="in neither train_dataset nor eval_dataset: 'b'"):
            answer(DatasetRows(), trainer, "eval", "b")


def test_a_stream_is_refused_by_name() -> None:
    with pytest.raises(ConfigError, match="train_dataset is a stream"):
        answer(DatasetRows(), a_trainer(iter(a_dataset(1, "a"))), "train", "a")


def test_a_dataset_is_read_once() -> None:
    class Counting(list[Any]):
        num_reads = 0

        def __iter__(self) -> Any:
            self.num_reads += 1
            return super().__iter__()

    dataset, rows = Counting(a_dataset(1, "a")), DatasetRows()
    for _ in range(3):
        answer(rows, a_trainer(dataset), "train", "a")
    assert dataset.num_reads == 1
