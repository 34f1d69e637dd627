"""Staged weights: leftovers of killed processes are removed, and weights that do not fit go to disk."""

from __future__ import annotations

import os
import subprocess
import sys
from collections import namedtuple
from pathlib import Path

import pytest

from seer.engine import staged_weights
from seer.engine.staged_weights import make_shared_folder


@pytest.fixture
def memory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setattr(staged_weights, "_SHARED_MEMORY", tmp_path)
    return tmp_path


def test_folders_of_processes_that_are_gone_are_removed_and_others_are_not(memory: Path) -> None:
    done = subprocess.Popen([sys.executable, "-c", ""])
    done.wait()
    orphan, mine = memory / f"seer-model-{done.pid}-x", memory / f"seer-model-{os.getpid()}-x"
    other = memory / f"seer-weights-{done.pid}-x"
    for folder in (orphan, mine, other):
        folder.mkdir()
    made = make_shared_folder("seer-model", 1)
    assert made.parent == memory
    assert made.name.startswith(f"seer-model-{os.getpid()}-")
    assert not orphan.exists()
    assert mine.exists()
    assert other.exists()


def test_weights_that_do_not_fit_go_to_disk_with_a_warning(
    memory: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    usage = namedtuple("usage", "total used free")
    monkeypatch.setattr("shutil.disk_usage", lambda path: usage(10, 5, 5))
    made = make_shared_folder("seer-model", 6)
    made.rmdir()
    assert made.parent != memory
    assert "docker run --shm-size" in caplog.text
