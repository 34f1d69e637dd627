# SPDX-License-Identifier: Apache-2.0
"""Two processes of a training run that know each other as ranks, on the CPU."""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
from pathlib import Path
from typing import Any


def run_two(
    script: Path, folder: Path, *, deadline_s: float = 200, for_cpus: tuple[str, str] = ("ACCELERATE_USE_CPU", "true")
) -> list[dict[str, Any]]:
    """Run `python SCRIPT FOLDER` as each of two ranks; what each has written to FOLDER/rank-N.json.

    `for_cpus` is the variable that keeps them off GPUs.
    """
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    common = {"WORLD_SIZE": "2", "LOCAL_WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
    common |= {"OMP_NUM_THREADS": "1", for_cpus[0]: for_cpus[1]}
    processes = [
        subprocess.Popen(
            [sys.executable, str(script), str(folder)],
            env=dict(os.environ) | common | {"RANK": str(rank), "LOCAL_RANK": str(rank)},
            stdout=subprocess.DEVNULL,
            stderr=subprocess.PIPE,
            text=True,
        )
        for rank in range(2)
    ]
    try:
        words = [process.communicate(timeout=deadline_s)[1] for process in processes]
    finally:
        for process in processes:
            process.kill()
    for process, printed in zip(processes, words, strict=True):
        assert process.returncode == 0, printed[-2000:]
    return [json.loads((folder / f"rank-{rank}.json").read_text()) for rank in range(2)]
