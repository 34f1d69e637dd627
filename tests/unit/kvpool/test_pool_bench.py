# SPDX-License-Identifier: Apache-2.0
"""`seer bench pool` runs nothing that lies in the current folder."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from seer.machine.safe_path import without_current_folder

MODULES = "pickle.py", "numpy.py", "msgspec.py", "signal.py"


def test_the_processes_of_a_measurement_import_nothing_from_the_current_folder(tmp_path: Path) -> None:
    folder = tmp_path / "hostile"
    folder.mkdir()
    for name in MODULES:
        (folder / name).write_text(f"open({str(tmp_path / 'imported')!r}, 'a').write(__name__)\nraise SystemExit(9)\n")
    program = Path(sys.executable).parent / "seer"
    sizes = "--block", "4KiB", "--round", "64KiB", "--rounds", "1", "--batch", "4"
    done = subprocess.run(
        [sys.executable, str(program), "bench", "pool", *sizes, "--json"],
        cwd=folder, capture_output=True, text=True, timeout=120, check=False,
    )  # fmt: skip
    assert not (tmp_path / "imported").exists()
    assert done.returncode == 0, done.stderr


@pytest.mark.parametrize("before", [None, "0"])
def test_the_environment_is_as_before(before: str | None, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("PYTHONSAFEPATH", raising=False)
    if before is not None:
        monkeypatch.setenv("PYTHONSAFEPATH", before)
    with without_current_folder():
        assert os.environ["PYTHONSAFEPATH"] == "1"
    assert os.environ.get("PYTHONSAFEPATH") == before
