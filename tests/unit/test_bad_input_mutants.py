# SPDX-License-Identifier: Apache-2.0
"""The bad inputs find a check that is gone: each check of a field is dropped in turn, and a case must fail."""

from __future__ import annotations

import importlib
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import pytest

import bad_commands
import bad_files
from bad_commands import BadCommand
from seer.cli.number_option import NumberOption
from seer.ranges import base_type, check
from seer.runs.prompt_lines import _OWN, _SAMPLING

DOORS = tuple(
    importlib.import_module(name)
    for name in ("seer.config.build", "seer.ranges", "seer.machine.json_files", "seer.runs.prompt_lines")
)
"""Modules through which the fields of files and settings are checked."""


def families(cases: Iterable[BadCommand]) -> dict[str, list[BadCommand]]:
    """Cases by the field that they are about: their names without the number at the end."""
    found: dict[str, list[BadCommand]] = {}
    for case in cases:
        stem, _, number = case.name.rpartition("-")
        if number.isdigit():
            found.setdefault(stem, []).append(case)
    return found


SETTINGS = {name: cases for name, cases in families(bad_commands.config_cases()).items() if len(cases) > 8}
"""Numbers have many bad values; words and sections, which other checks refuse, have few."""
PROMPTS = {f"prompt-{field}": families(bad_commands.prompt_cases())[f"prompt-{field}"] for field in (*_OWN, *_SAMPLING)}
MODELS = families(bad_files.model_cases())
OPTIONS = {name: cases for name, cases in families(bad_commands.option_cases()).items() if cases[0].is_ranged}


def without(field: str) -> Callable[[Any, Any, str], None]:
    """`check` that lets this field pass."""

    def mutant(value: Any, kind: Any, name: str) -> None:
        if name.rpartition(".")[2].rpartition(" ")[2] != field:
            check(value, kind, name)

    return mutant


def survives(cases: list[BadCommand], folder: Path) -> bool:
    """Whether every case still ends in a clean refusal."""
    return all(bad_commands.run(case, folder).problem(case.mentions) is None for case in cases)


@pytest.mark.parametrize("name", [*SETTINGS, *PROMPTS, *MODELS])
def test_a_field_without_its_check_is_noticed(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    cases = (SETTINGS | PROMPTS | MODELS)[name]
    monkeypatch.chdir(tmp_path)
    for door in DOORS:
        monkeypatch.setattr(door, "check", without(name.rpartition("-")[2].rpartition(".")[2]))
    assert not survives(cases, tmp_path)


@pytest.mark.parametrize("name", OPTIONS)
def test_an_option_without_its_range_is_noticed(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(NumberOption, "__call__", lambda self, text: base_type(self.kind)(text))
    assert not survives(OPTIONS[name], tmp_path)
