# SPDX-License-Identifier: Apache-2.0
"""Where child processes import from: what the driver imports from, without the current folder."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

import seer
from seer.hosting import launch
from seer.hosting.launch import ChildProcess, module_folders

HOSTILE = "numpy.py", "msgspec.py", "seer_hostile.py"
ROLLOUT = """
import asyncio
from seer import HostingConfig, Rollout, Sampling

async def main():
    async with Rollout("none", engine="fake", instances=2, hosting=HostingConfig(pin_cores=False)) as rollout:
        groups = [g async for g in rollout.run([[1, 2]], n=2, sampling=Sampling(max_tokens=5))]
        print(sum(len(group.responses) for group in groups))

asyncio.run(main())
"""


@pytest.fixture
def hostile(tmp_path: Path) -> Path:
    """A folder whose modules leave a mark when they are imported."""
    folder = tmp_path / "hostile"
    folder.mkdir()
    for name in HOSTILE:
        (folder / name).write_text(f"open({str(tmp_path / 'imported')!r}, 'a').write(__name__)\nraise SystemExit(9)\n")
    return folder


def test_instances_import_nothing_from_the_current_folder(hostile: Path, tmp_path: Path) -> None:
    script = tmp_path / "script.py"
    script.write_text(ROLLOUT)
    done = subprocess.run(
        [sys.executable, str(script)], cwd=hostile, capture_output=True, text=True, timeout=120, check=False
    )
    assert (done.stdout.strip(), done.returncode) == ("2", 0), done.stderr
    assert not (tmp_path / "imported").exists()


def test_the_empty_entry_of_python_c_is_not_passed_on(hostile: Path, tmp_path: Path) -> None:
    # The driver itself looks there, so it imports what it needs before it enters the folder.
    code = f"import numpy, msgspec, os\nos.chdir({str(hostile)!r})\n{ROLLOUT}"
    done = subprocess.run(
        [sys.executable, "-c", f"import seer, sys; assert sys.path[0] == ''\n{code}"],
        cwd=tmp_path, capture_output=True, text=True, timeout=120, check=False,
    )  # fmt: skip
    assert (done.stdout.strip(), done.returncode) == ("2", 0), done.stderr
    assert not (tmp_path / "imported").exists()


def test_only_the_current_folder_and_relative_entries_are_left_out(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    here, there = tmp_path / "here", tmp_path / "there"
    here.mkdir()
    there.mkdir()
    link = tmp_path / "link"
    link.symlink_to(here)
    monkeypatch.chdir(here)
    monkeypatch.setattr(sys, "path", ["", ".", "../there", str(here), str(link), str(there), str(tmp_path / "gone")])
    monkeypatch.delenv("PYTHONPATH", raising=False)
    assert module_folders(()) == [str(there), str(tmp_path / "gone")]
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join(["", ".", str(here)]))
    assert module_folders(()) == [str(here), str(there), str(tmp_path / "gone")]


def test_the_folder_of_a_module_that_the_child_needs_stays(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "my_factories.py").write_text("")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", [str(tmp_path), *sys.path])
    assert str(tmp_path) not in module_folders(("seer.hosting.child",))
    assert str(tmp_path) in module_folders(("my_factories.fakes",))
    source = Path(seer.__file__).parent.parent
    monkeypatch.chdir(source)
    monkeypatch.setattr(sys, "path", [str(source), *sys.path])
    assert str(source) in module_folders(("seer.hosting.child",))


def cause_of_end(program: str, folder: Path, log_dir: Path | None = None) -> str:
    """Run a module with this text to its end; returns what the driver says of that."""
    (folder / "failing.py").write_text(program)
    child = ChildProcess("failing", log_dir, module="failing", single_thread=True)
    with child.socket:
        child._process.wait()
        cause = child.exit_cause()
    child.close()
    return cause


def test_a_process_that_ended_by_itself_says_which_error_it_was(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.syspath_prepend(str(tmp_path))
    cause = cause_of_end(
        "print('ValueError: the cause')\nprint('and much more\\n' * 1000)\n"
        "raise SystemExit('RuntimeError: see the stack trace above')\n",
        tmp_path,
    )
    assert cause.startswith("exit status 1; in its log: ValueError: the cause; the end of its log:\n")
    assert cause.endswith("see the stack trace above")


def test_the_error_of_an_earlier_process_is_not_that_of_the_next_in_the_same_log(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.syspath_prepend(str(tmp_path))
    logs = tmp_path / "logs"
    first = cause_of_end("raise SystemExit('ValueError: of the first')", tmp_path, logs)
    assert "ValueError: of the first" in first
    assert cause_of_end("raise SystemExit('it ends')", tmp_path, logs) == "exit status 1; the end of its log:\nit ends"
    assert cause_of_end("raise SystemExit(3)", tmp_path, logs) == "exit status 3"


@pytest.mark.parametrize("has_folder", [True, False])
def test_a_log_that_gets_too_long_keeps_its_end(
    has_folder: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(launch, "MAX_LOG_BYTES", 1000)
    monkeypatch.setattr(launch, "KEPT_LOG_BYTES", 100)
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    (tmp_path / "talker.py").write_text(
        "import sys\nfor line in open(int(sys.argv[1])): print(line * 300, flush=True)\n"
    )
    monkeypatch.syspath_prepend(str(tmp_path))
    child = ChildProcess("talker", tmp_path if has_folder else None, module="talker", single_thread=True)
    with child.socket as driver:
        sizes = []
        for word in ("one", "two", "end"):
            driver.sendall(f"{word}\n".encode())
            while not child.log_tail().endswith(word):
                assert child._process.poll() is None, child.exit_cause()
            child.bound_log()
            sizes.append(os.fstat(child._log.fileno()).st_size)
    child._process.wait()
    assert max(sizes) < 200
    assert child.log_tail().endswith("end")
    child.close()
