# SPDX-License-Identifier: Apache-2.0
"""`seer` commands in processes of their own, and what such a process must not leave behind."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

from faults import children_of

DEADLINE_S = 300.0


def a_command(*words: str, cwd: Path | None = None) -> subprocess.Popen[str]:
    return subprocess.Popen(
        [sys.executable, "-m", "seer.cli.main", *words],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        cwd=cwd,
        env=dict(os.environ) | {"PYTHONPATH": os.pathsep.join(sys.path)},
    )


def wait_until(condition: Callable[[], bool], what: str, process: subprocess.Popen[str] | None = None) -> None:
    deadline = time.monotonic() + DEADLINE_S
    while not condition():
        assert time.monotonic() < deadline, what
        assert process is None or process.poll() is None, process.communicate()
        time.sleep(0.005)


def num_lines(path: Path) -> int:
    return path.read_bytes().count(b"\n") if path.exists() else 0


def shared_files(pid: int) -> set[Path]:
    """Files and folders for this user's processes that a process holds open, by its open lock files and arenas."""
    found = set()
    for number in list(Path(f"/proc/{pid}/fd").iterdir()):
        try:
            path = Path(os.readlink(number))
        except OSError:  # closed since
            continue
        if path.parent.name.startswith("seer-"):
            found |= {path, path.with_name(path.name.removesuffix(".folder.lock"))}
    return found


def assert_nothing_left(run_dir: Path, files: set[Path]) -> None:
    assert [path for path in files if path.exists()] == [], "shared memory and lock files"
    wait_until(lambda: not children_of(run_dir), f"processes of {run_dir}")
    names = {path.name for path in run_dir.rglob("*")}
    assert not [name for name in names if name.endswith((".lock", ".partial"))], names


def results(run_dir: Path) -> dict[tuple[str, int], list[int]]:
    """Every line of the results, which must be whole."""
    path = run_dir / "results.jsonl"
    text = path.read_text() if path.exists() else ""
    assert not text or text.endswith("\n")
    records = [json.loads(line) for line in text.splitlines()]
    tokens = {(r["prompt_id"], r["index"]): r["token_ids"] for r in records}
    assert len(tokens) == len(records), "a response was written twice"
    return tokens
