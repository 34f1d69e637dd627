# SPDX-License-Identifier: Apache-2.0
"""A training run that is killed, twice, and resumed from the trainer's checkpoints ends as if nothing had happened."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("trl")

import trl_killed
from seer.report.training import read_training
from seer.runs.run_folder import RunFolder
from trl_toy import same_weights, weights_of

SCRIPT = Path(trl_killed.__file__)


def killed(output_dir: Path, *arguments: str) -> None:
    environment = dict(os.environ) | {"OMP_NUM_THREADS": "1", "PYTHONPATH": str(SCRIPT.parent)}
    done = subprocess.run(
        [sys.executable, str(SCRIPT), str(output_dir), *arguments],
        env=environment,
        capture_output=True,
        text=True,
        timeout=240,
        check=False,
    )
    assert done.returncode == -signal.SIGKILL, done.stderr[-2000:]


def test_a_killed_run_resumes_to_the_same_weights(tmp_path: Path) -> None:
    straight, rollouts = trl_killed.a_run(tmp_path / "straight")
    with rollouts:
        straight.train()

    killed(tmp_path / "killed", "3", "during")
    killed(tmp_path / "killed", "5", "between", "resume")
    resumed, rollouts = trl_killed.a_run(tmp_path / "killed")
    with rollouts:
        resumed.train(resume_from_checkpoint=True)

    assert resumed.state.global_step == straight.state.global_step == 8
    assert same_weights(weights_of(resumed), weights_of(straight))
    # The instances of a resumed run were started anew, from the checkpoint: weights version 0, on policy from its
    # first token.
    steps = read_training(RunFolder(tmp_path / "killed" / "seer"))
    assert [step.rollout["step"] for step in steps] == list(range(8))
    assert [step.rollout["weights_version"] for step in steps] == [0, 1, 2, 0, 1, 0, 1, 2]
    gaps = [step.get("mean_gap") for step in steps]
    assert all(gap is not None and gap < 1e-5 for gap in gaps)
    lengths = [
        [step.rollout["num_tokens"] for step in read_training(RunFolder(tmp_path / name / "seer"))]
        for name in ("straight", "killed")
    ]
    assert lengths[0] == lengths[1]
