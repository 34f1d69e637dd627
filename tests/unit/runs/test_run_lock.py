# SPDX-License-Identifier: Apache-2.0
"""The lock of a run: one holder, released by the kernel, and no file that blocks anyone later."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from seer.errors import InputError
from seer.runs.identity import RunIdentity
from seer.runs.journal import Journal
from seer.runs.run_folder import RunFolder
from seer.runs.run_lock import RunLock, unlock_file

ME, YOU = RunIdentity(settings="me", weights=""), RunIdentity(settings="you", weights="")
HOLD = "import sys; from pathlib import Path; from seer.runs.run_folder import RunFolder; "
HOLD += "lock = RunFolder(Path(sys.argv[1])).held(); lock.__enter__(); print('held', flush=True); sys.stdin.read()"


def a_holder(folder: Path) -> subprocess.Popen[str]:
    """Another process that holds the lock of a run's folder."""
    process = subprocess.Popen(
        [sys.executable, "-c", HOLD, str(folder)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
        env=dict(os.environ) | {"PYTHONPATH": os.pathsep.join(sys.path)},
    )
    assert process.stdout is not None
    assert process.stdout.readline() == "held\n"
    return process


def test_a_second_driver_is_refused_with_the_folder_and_the_process(tmp_path: Path) -> None:
    with a_holder(tmp_path / "run") as other:
        with pytest.raises(InputError, match=str(tmp_path / "run")) as refused, RunFolder(tmp_path / "run").held():
            pass
        assert f"process {other.pid} " in str(refused.value.hint)
        other.kill()


def test_the_death_of_a_driver_releases_its_lock_and_the_next_removes_the_file(tmp_path: Path) -> None:
    folder = RunFolder(tmp_path)
    with a_holder(tmp_path) as other:
        other.kill()
    assert folder.lock.exists()
    with folder.held():
        assert folder.lock.read_text() == f"{os.getpid()}\n"
    assert not folder.lock.exists()


def test_a_folder_made_for_the_lock_goes_with_it_unless_something_was_written(tmp_path: Path) -> None:
    with RunFolder(tmp_path / "empty").held():
        pass
    assert not (tmp_path / "empty").exists()
    with RunFolder(tmp_path / "full").held():
        (tmp_path / "full" / "file").touch()
    assert os.listdir(tmp_path / "full") == ["file"]
    (tmp_path / "before").mkdir()
    with RunFolder(tmp_path / "before").held():
        pass
    assert (tmp_path / "before").exists()


def test_a_lock_file_that_was_removed_and_made_anew_is_locked_anew(tmp_path: Path) -> None:
    path = tmp_path / "run.lock"
    first = RunLock(path, what=tmp_path)
    path.unlink()
    second = RunLock(path, what=tmp_path)
    first.release()
    assert path.exists(), "the file of another holder was removed"
    with pytest.raises(InputError, match="in use"):
        RunLock(path, what=tmp_path)
    second.release()
    assert not path.exists()


@pytest.mark.parametrize("kind", ["symbolic link", "hard link", "fifo", "folder"])
def test_only_a_plain_file_is_locked_and_written_to(tmp_path: Path, kind: str) -> None:
    path, other = tmp_path / "run.lock", tmp_path / "other"
    other.write_text("mine")
    if kind == "symbolic link":
        path.symlink_to(other)
    elif kind == "hard link":
        path.hardlink_to(other)
    elif kind == "fifo":
        os.mkfifo(path)
    else:
        path.mkdir()
    with pytest.raises(InputError, match=r"cannot be (locked|written)"):
        RunLock(path, what=tmp_path)
    assert other.read_text() == "mine"


def test_a_forked_child_does_not_keep_the_lock(tmp_path: Path) -> None:
    lock = RunLock(tmp_path / "run.lock", what=tmp_path)
    (ready, runs), (wait, end) = os.pipe(), os.pipe()
    child = os.fork()
    if child == 0:
        os.close(end)
        os.write(runs, b"1")
        os.read(wait, 1)
        os._exit(0)
    os.read(ready, 1)
    try:
        unlock_file(lock._lock)  # as at the parent's death: the descriptor is closed, and the file stays
        RunLock(tmp_path / "run.lock", what=tmp_path).release()
    finally:
        os.close(end)
        os.waitpid(child, 0)
        for descriptor in (ready, runs, wait):
            os.close(descriptor)


def test_a_journal_has_one_writer(tmp_path: Path) -> None:
    path = tmp_path / "journal.jsonl"
    first = Journal.create(path, ME)
    before = path.read_bytes()
    for open_again in (Journal.create, Journal.resume):
        with pytest.raises(InputError, match="in use"):
            open_again(path, ME)
    assert path.read_bytes() == before
    Journal.create(tmp_path / "other.jsonl", ME).close()
    first.close()
    assert sorted(os.listdir(tmp_path)) == ["journal.jsonl", "other.jsonl"]
    with pytest.raises(InputError, match="another engine"):
        Journal.resume(path, YOU)
    Journal.resume(path, ME).close()
    assert sorted(os.listdir(tmp_path)) == ["journal.jsonl", "other.jsonl"]
