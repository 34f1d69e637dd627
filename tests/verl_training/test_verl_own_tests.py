# SPDX-License-Identifier: Apache-2.0
"""verl's own tests of its agent loop that need no GPU, with Seer's worker in place of verl's."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

verl = pytest.importorskip("verl")


def test_they_pass_with_our_worker() -> None:
    folder = Path(verl.__file__).parents[1] / "tests/experimental/agent_loop"  # verl's wheel brings its tests
    files = sorted(map(str, folder.glob("*_on_cpu.py")))
    assert files, f"no tests in {folder}"
    # Without our settings of pytest, which are above this folder where the virtual environment is in the checkout.
    alone = ["-c", os.devnull, "--rootdir", str(folder), "-W", "ignore"]
    command = [sys.executable, "-m", "pytest", "-q", *alone, "-p", "no:cacheprovider", "-p", "seer_workers", *files]
    done = subprocess.run(command, cwd=folder, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout[-5000:]
