# SPDX-License-Identifier: Apache-2.0
"""The folder of a run: what is none is refused, with what it is instead."""

from __future__ import annotations

from pathlib import Path

import pytest

from seer.cli.main import main
from seer.errors import InputError
from seer.runs.run_folder import RunFolder


def test_the_folder_of_a_simulation_is_refused_as_one(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder = tmp_path / "simulated"
    arguments = ["synthetic", "--groups", "2", "--mean", "50", "--max", "100", "--schedulers", "verl"]
    assert main(["simulate", *arguments, "--out", str(folder)]) == 0
    for path in (folder, folder / "verl"):
        with pytest.raises(InputError) as refused:
            RunFolder.find(path)
        assert "it is of a simulation" in str(refused.value.hint)


def test_a_folder_without_a_run_is_refused(tmp_path: Path) -> None:
    with pytest.raises(InputError) as refused:
        RunFolder.find(tmp_path)
    assert "simulation" not in str(refused.value.hint)
