# SPDX-License-Identifier: Apache-2.0
"""Two ranks: one rollout on the main one, for both, the same as a single rank would have made."""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("trl")

import trl_rank

SCRIPT = Path(trl_rank.__file__)


@pytest.fixture(scope="module")
def two_ranks(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    """What each of two processes found."""
    folder = tmp_path_factory.mktemp("ranks")
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    common = {"WORLD_SIZE": "2", "LOCAL_WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
    common |= {"OMP_NUM_THREADS": "1", "ACCELERATE_USE_CPU": "true"}
    processes = [
        subprocess.Popen(
            [sys.executable, str(SCRIPT), str(folder)],
            env=dict(os.environ) | common | {"RANK": str(rank), "LOCAL_RANK": str(rank)},
            stdout=subprocess.DEVNULL,
            stderr=subprocess.PIPE,
            text=True,
        )
        for rank in range(2)
    ]
    try:
        words = [process.communicate(timeout=200)[1] for process in processes]
    finally:
        for process in processes:
            process.kill()
    for process, printed in zip(processes, words, strict=True):
        assert process.returncode == 0, printed[-2000:]
    return [json.loads((folder / f"rank-{rank}.json").read_text()) for rank in range(2)]


def test_two_ranks_get_what_one_would(two_ranks: list[dict[str, Any]], tmp_path: Path) -> None:
    alone = trl_rank.a_run(tmp_path, 1)
    first, second = (found["completions"] for found in two_ranks)
    assert len(first) == len(second) == 2
    # Of the first step; afterwards gradients are summed in another order, and the weights' last bits differ.
    assert first[0] + second[0] == alone["completions"][0]


def test_the_main_rank_alone_has_instances(two_ranks: list[dict[str, Any]]) -> None:
    assert [found["has_instances"] for found in two_ranks] == [True, False]


def test_a_failure_of_the_main_rank_is_raised_on_both(two_ranks: list[dict[str, Any]]) -> None:
    main, other = (found["error"] for found in two_ranks)
    assert "0.001 s" in main
    assert other == f"the rollout failed on the main rank: DeadlineExceeded: {main}"
