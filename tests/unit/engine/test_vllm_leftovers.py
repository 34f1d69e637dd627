# SPDX-License-Identifier: Apache-2.0
"""vLLM's processes make their files in a folder of ours, whose path has room for the names of sockets."""

from __future__ import annotations

import contextlib
import os
import socket
import stat
import subprocess
import sys
import tempfile
import uuid
from collections.abc import Iterator
from pathlib import Path

import pytest

from seer.engine.vllm import leftovers
from seer.machine import owned_folders, private_files

VARIABLES = ("VLLM_RPC_BASE_PATH", "TMPDIR", "TORCHINDUCTOR_CACHE_DIR", "SEER_VLLM_HOST")
HOST = """
import subprocess, sys
from seer.engine.vllm import leftovers
leftovers.place_files()
leftovers.end_with_host()  # vLLM calls it here, too
program = "from seer.engine.vllm import leftovers; leftovers.end_with_host(); print('begun', flush=True); input()"
subprocess.Popen([sys.executable, "-c", program], stdin=0)
input()
"""


@pytest.fixture(autouse=True)
def only_this_test(monkeypatch: pytest.MonkeyPatch) -> None:
    """What is set for the whole process is undone."""
    for name in VARIABLES:
        monkeypatch.setenv(name, "")  # so that it is put back
        monkeypatch.delenv(name)
    monkeypatch.setattr(leftovers, "name_segments_after", lambda folder: None)


@contextlib.contextmanager
def a_temporary_folder(num_chars: int, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """One whose path has so many characters."""
    with tempfile.TemporaryDirectory(prefix="t", dir="/tmp") as home:
        folder = Path(home, "x" * (num_chars - len(home) - 1))
        folder.mkdir()
        monkeypatch.setattr(tempfile, "tempdir", str(folder))
        yield folder


@pytest.mark.parametrize("num_chars", [41, 42, 60, 200])
def test_a_temporary_folder_of_any_length_leaves_room_for_sockets(
    num_chars: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    with a_temporary_folder(num_chars, monkeypatch) as temporary, contextlib.ExitStack() as after:
        folder = leftovers.place_files()
        after.callback(owned_folders.remove_folder, folder)
        assert folder.is_relative_to(temporary) == (len(f"{temporary}/seer-{os.geteuid()}") <= 48)
        listener = after.enter_context(socket.socket(socket.AF_UNIX))
        listener.bind(f"{os.environ['VLLM_RPC_BASE_PATH']}/{uuid.uuid4()}")


def test_temporary_files_of_its_processes_go_with_its_folder_and_compiled_kernels_stay(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    with a_temporary_folder(30, monkeypatch) as temporary:
        folder = leftovers.place_files()
        program = "import tempfile; print(tempfile.mkstemp()[1])"
        made = Path(subprocess.run([sys.executable, "-c", program], stdout=-1, check=True, text=True).stdout.strip())
        assert made.parent == folder
        assert Path(os.environ["TORCHINDUCTOR_CACHE_DIR"]) == temporary / f"seer-{os.geteuid()}" / "kernels"
        owned_folders.remove_folder(folder)
        assert not made.exists()


@pytest.mark.parametrize("is_set", [False, True])
def test_compiled_kernels_are_taken_from_a_private_folder_alone(is_set: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """PyTorch runs what it finds there, and its own name for it can be taken by another user."""
    cache = pytest.importorskip("torch._inductor.runtime.cache_dir_utils")
    with a_temporary_folder(30, monkeypatch) as temporary:
        theirs = Path(cache.default_cache_dir())
        theirs.mkdir(mode=0o777)
        monkeypatch.delenv("TORCHINDUCTOR_CACHE_DIR", raising=False)
        if is_set:
            monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(theirs))
        folder = leftovers.place_files()
        used = Path(cache.cache_dir())
        assert theirs.parent == temporary
        assert used != theirs
        assert stat.S_IMODE(used.parent.stat().st_mode) == 0o700
        assert private_files.check_folder(used.parent) == private_files.folder(temporary)
        owned_folders.remove_folder(folder)


def test_a_place_of_kernels_that_the_user_chose_stays(monkeypatch: pytest.MonkeyPatch) -> None:
    with a_temporary_folder(30, monkeypatch):
        monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", "/of/the/user")
        owned_folders.remove_folder(leftovers.place_files())
        assert os.environ["TORCHINDUCTOR_CACHE_DIR"] == "/of/the/user"


def test_a_process_of_an_engine_ends_with_its_host_from_its_beginning(monkeypatch: pytest.MonkeyPatch) -> None:
    with a_temporary_folder(30, monkeypatch) as temporary:
        environment = {**os.environ, "TMPDIR": str(temporary)}
        host = subprocess.Popen([sys.executable, "-c", HOST], stdin=-1, stdout=-1, env=environment)
        with host:
            assert host.stdin is not None
            assert host.stdout is not None
            assert host.stdout.readline() == b"begun\n"
            host.kill()
            assert host.stdout.read() == b"", "the other has its end too, until it ends"
        program = "from seer.engine.vllm import leftovers; leftovers.end_with_host(); print('begun', flush=True)"
        late = subprocess.run(
            [sys.executable, "-c", program], env=environment | {"SEER_VLLM_HOST": str(host.pid)}, stdout=-1, check=False
        )
        assert (late.returncode, late.stdout) == (1, b"")
