# SPDX-License-Identifier: Apache-2.0
"""verl trains a tiny model with Seer's rollout and with its own: GRPO, two ranks, two replicas, on a CPU.

Each run is a real one, of `examples/grpo_verl/train.sh`; most of its time goes into the start of its processes. Both
have the same settings except `actor_rollout_ref.rollout.name`; chunks are short, so that there is something to move.
"""

from __future__ import annotations

import json
import math
from pathlib import Path

import pytest

pytest.importorskip("verl")

from verl_toy import RANDOM_REWARD, ToyRun, make_toy, run_toy

NUM_STEPS = 10
SEER = tuple(f"+actor_rollout_ref.rollout.custom.seer.{one}" for one in ("chunk_tokens=32", "kv_blocks=64"))
VALIDATION = ("trainer.test_freq=5", "actor_rollout_ref.rollout.val_kwargs.n=2")
"""verl validates greedily by default: both responses to a prompt are then equal."""
MIN_END_REWARD = 0.55
"""Digits of either kind would give a half; runs that learned late were seen at 0.7."""
MAX_GAP = 0.3
"""Between the mean rewards of two runs: 0.04 to 0.17 were seen, and a run that learns nothing is about 0.4 below."""


@pytest.fixture(scope="module")
def toy(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("toy")
    make_toy(folder)
    return folder


@pytest.fixture(scope="module")
def seer_run(toy: Path) -> ToyRun:
    recorded = f"+actor_rollout_ref.rollout.custom.seer.run_dir={toy}/record"
    run = run_toy(toy, "seer", NUM_STEPS, *SEER, recorded, *VALIDATION)
    assert run.code == 0, run.output[-5000:]
    return run


@pytest.fixture(scope="module")
def stock_run(toy: Path) -> ToyRun:
    run = run_toy(toy, "vllm", NUM_STEPS)
    assert run.code == 0, run.output[-5000:]
    return run


def test_it_learns_as_with_the_stock_rollout(seer_run: ToyRun, stock_run: ToyRun) -> None:
    for run in (seer_run, stock_run):
        assert len(run.rewards) == NUM_STEPS
        assert run.rewards[0] < RANDOM_REWARD + 0.15
        assert sum(run.rewards[-3:]) / 3 > MIN_END_REWARD
    # Sampling differs, so the curves do; the mean over the steps is the area between them.
    gap = sum(seer_run.rewards) / NUM_STEPS - sum(stock_run.rewards) / NUM_STEPS
    assert abs(gap) < MAX_GAP


def test_requests_move_and_drafts_are_verified(seer_run: ToyRun) -> None:
    assert seer_run.series("seer/responses") == [64.0] * NUM_STEPS
    assert sum(seer_run.series("seer/moves")) > 0
    assert sum(seer_run.series("seer/moved_kv_tokens")) > 0
    assert sum(seer_run.series("seer/drafted_tokens")) > 0
    assert sum(seer_run.series("seer/accepted_draft_tokens")) > 0
    assert min(seer_run.series("seer/stock_rollout_s")) > min(seer_run.series("seer/oracle_rollout_s")) > 0
    assert "stock dispatch would have taken" in seer_run.output


def test_the_tokens_are_on_policy(seer_run: ToyRun) -> None:
    assert max(seer_run.series("training/rollout_probs_diff_max")) < 1e-6
    assert seer_run.series("seer/weights_version") == [float(step) for step in range(1, NUM_STEPS + 1)]
    assert max(seer_run.series("seer/on_policy/mean_difference")) < 1e-6
    assert not any(math.isnan(loss) for loss in seer_run.series("actor/pg_loss"))


def test_validation_has_its_own_sampling_and_is_not_counted_as_training(seer_run: ToyRun) -> None:
    validated = [at for at, step in enumerate(seer_run.steps, 1) if any(name.startswith("val-") for name in step)]
    assert validated == [5, NUM_STEPS]
    spreads = [value for step in seer_run.steps for name, value in step.items() if _is_spread(name)]
    assert len(spreads) == len(validated)
    assert max(spreads) == 0.0, "validation was not greedy"


def _is_spread(name: str) -> bool:
    """verl's name of the mean over prompts of the spread of a prompt's rewards."""
    return name.startswith("val-") and name.endswith("/reward/std@2")


def test_the_newest_steps_are_recorded(seer_run: ToyRun, toy: Path) -> None:
    record = toy / "record"
    assert json.loads((record / "run.json").read_text())["command"] == "train"
    steps = sorted(path.name for path in record.glob("step-*"))
    assert steps == ["step-000008", "step-000009", "step-000010", "step-000010-val"]
    summary = json.loads((record / steps[0] / "run.json").read_text())["summary"]
    assert summary["num_requests"] == 64
