# SPDX-License-Identifier: Apache-2.0
"""Bad inputs of every kind are refused in one line with exit code 2, before anything starts."""

from __future__ import annotations

from pathlib import Path

import pytest

import bad_commands
import bad_files
import bad_recordings
from bad_commands import BadCommand

CASES = {
    case.name: case
    for cases in (
        bad_commands.config_cases(),
        bad_commands.option_cases(),
        bad_commands.prompt_cases(),
        bad_commands.set_cases(),
        bad_commands.name_cases(),
        bad_files.model_cases(),
        bad_files.recording_cases(),
        bad_files.trace_cases(),
        bad_recordings.replay_cases(),
    )
    for case in cases
}


@pytest.mark.parametrize("case", CASES.values(), ids=CASES)
def test_a_bad_input_is_one_line_and_exit_code_2(
    case: BadCommand, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    assert bad_commands.run(case, tmp_path).problem(case.mentions) is None


def test_there_are_at_least_300_of_each_origin_together() -> None:
    assert len(CASES) >= 300
