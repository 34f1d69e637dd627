# SPDX-License-Identifier: Apache-2.0
"""verl trains a LoRA adapter and merges it for the rollout: Seer generates with the merged weights, in every step."""

from __future__ import annotations

from pathlib import Path

import pytest

pytest.importorskip("verl")
pytest.importorskip("peft")

from verl_toy import RANDOM_REWARD, make_toy, run_toy

NUM_STEPS = 6
MODEL = "actor_rollout_ref.model"
ADAPTER = (
    f"{MODEL}.lora_rank=8",
    f"{MODEL}.lora_alpha=16",
    f"{MODEL}.lora.merge=True",
    "actor_rollout_ref.actor.optim.lr=2e-2",
)
SEER = tuple(f"+actor_rollout_ref.rollout.custom.seer.{one}" for one in ("chunk_tokens=32", "kv_blocks=64"))
MAX_MEAN_DIFFERENCE = 2e-3
"""verl rounds merged weights to bfloat16 for the rollout, also where it trains in float32: 3e-4 to 6e-4 were seen."""


def test_rollouts_have_the_adapter_as_it_is_in_each_step(tmp_path: Path) -> None:
    make_toy(tmp_path)
    run = run_toy(tmp_path, "seer", NUM_STEPS, *SEER, *ADAPTER)
    assert run.code == 0, run.output[-5000:]
    assert run.series("seer/responses") == [64.0] * NUM_STEPS
    assert run.series("seer/weights_version") == [float(step) for step in range(1, NUM_STEPS + 1)]
    assert max(run.series("seer/on_policy/mean_difference")) < MAX_MEAN_DIFFERENCE
    # Only responses of the adapter get better: without it they would be those of the first step for ever.
    assert run.rewards[0] < RANDOM_REWARD + 0.15
    assert sum(run.rewards[-2:]) / 2 > RANDOM_REWARD + 0.2
