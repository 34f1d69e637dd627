# SPDX-License-Identifier: Apache-2.0
"""Shared memory and semaphores of `multiprocessing` that are named after a folder, as vLLM's processes make them."""

from __future__ import annotations

import secrets
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from seer.machine import owned_folders
from seer.machine.private_files import SHARED_MEMORY

PROGRAM = """
import multiprocessing, pathlib, sys
from multiprocessing import resource_tracker, shared_memory
from seer.machine import owned_folders, owned_segments

resource_tracker.register = lambda *_: None  # it is killed with its process
made = owned_folders.make_folder("kind", sys.argv[1])
owned_segments.name_segments_after(made)
memory = shared_memory.SharedMemory(create=True, size=9)
context = multiprocessing.get_context("spawn")
kept = context.SimpleQueue()  # its locks are semaphores
met_at = made / ("vllm_dist_" + made.name[-16:] * 2)  # as the ranks of a tensor-parallel engine do
of_ranks = pathlib.Path("/dev/shm", met_at.name + "-tp:0-[0-1]-cpushm_0")
for file in met_at, of_ranks:
    file.touch(0o600)
print(made, f"/dev/shm/{memory.name}", of_ranks, flush=True)
input()
"""


@pytest.fixture
def foreign() -> Iterator[Path]:
    """A segment of another program."""
    path = SHARED_MEMORY / f"psm_{secrets.token_hex(4)}"
    path.write_bytes(b"x")
    yield path
    path.unlink()


def a_process(folder: Path) -> tuple[subprocess.Popen[str], Path, list[Path]]:
    """A process with segments, its folder, and the files of its shared memory."""
    child = subprocess.Popen(
        [sys.executable, "-c", PROGRAM, str(folder)], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    )
    assert child.stdout is not None
    made, *segments = map(Path, child.stdout.readline().split())
    owner = made.name.rpartition("-")[2]
    return child, made, [*segments, *SHARED_MEMORY.glob(f"sem.mp-{owner}-*")]


def end(child: subprocess.Popen[str]) -> None:
    child.kill()
    child.communicate(timeout=20)


def test_segments_of_a_killed_process_go_with_its_folder_and_those_of_others_stay(
    tmp_path: Path, foreign: Path
) -> None:
    first, folder, segments = a_process(tmp_path)
    second, _, living = a_process(tmp_path)
    assert all(path.exists() for path in segments)
    assert {path.name[:4] for path in segments} == {"psm_", "sem.", "vllm"}
    end(first)
    assert owned_folders.remove_orphans(folder.parent) == [folder]
    assert [path for path in segments if path.exists()] == []
    assert all(path.exists() for path in [*living, foreign])
    end(second)
    owned_folders.remove_orphans(folder.parent)
    assert [path for path in living if path.exists()] == []


def test_a_folder_that_is_removed_takes_its_segments_along(tmp_path: Path) -> None:
    child, folder, segments = a_process(tmp_path)
    owned_folders.remove_folder(folder)
    assert [path for path in segments if path.exists()] == []
    end(child)
