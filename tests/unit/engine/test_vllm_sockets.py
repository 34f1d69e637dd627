# SPDX-License-Identifier: Apache-2.0
"""Where vLLM's sockets are made: the system's limit on the path of a socket is short."""

from __future__ import annotations

import contextlib
import os
import socket
import tempfile
import uuid
from pathlib import Path

import pytest

from seer.engine.vllm import leftovers
from seer.machine import owned_folders


@pytest.mark.parametrize("num_chars", [33, 34, 60, 200])
def test_a_temporary_folder_of_any_length_leaves_room_for_sockets(
    num_chars: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("VLLM_RPC_BASE_PATH", "")
    monkeypatch.setattr(leftovers, "name_segments_after", lambda folder: None)  # for the whole process
    with tempfile.TemporaryDirectory(prefix="t", dir="/tmp") as home, contextlib.ExitStack() as after:
        long = Path(home, "x" * (num_chars - len(home) - 1))
        long.mkdir()
        monkeypatch.setattr(tempfile, "tempdir", str(long))
        folder = leftovers.place_sockets()
        after.callback(owned_folders.remove_folder, folder)
        assert os.environ["VLLM_RPC_BASE_PATH"] == str(folder)
        assert folder.is_relative_to(long) == (len(f"{long}/seer-{os.geteuid()}") <= 40)
        listener = after.enter_context(socket.socket(socket.AF_UNIX))
        listener.bind(f"{folder}/{uuid.uuid4()}")
