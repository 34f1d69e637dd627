# SPDX-License-Identifier: Apache-2.0
"""verl trains with an environment of Seer: turns, tokens that it gives, its rewards, and tools that crash.

The run is of `examples/tools_verl/train.sh`. verl's own reward function would give -100.
"""

from __future__ import annotations

import pytest

pytest.importorskip("verl")

from verl_toy import PLUGINS, TOOLS_SCRIPT, ToyRun, make_toy, run_toy
from verl_toy_environment import MOST_TURNS

NUM_STEPS = 3
SETTINGS = (
    "+actor_rollout_ref.rollout.custom.seer.chunk_tokens=16",
    "+actor_rollout_ref.rollout.custom.seer.kv_blocks=64",
    "reward.custom_reward_function.name=unused",
    f"trainer.test_freq={NUM_STEPS}",
)


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> ToyRun:
    folder = tmp_path_factory.mktemp("tools")
    make_toy(folder)
    names = {"ENVIRONMENT": f"{PLUGINS / 'verl_toy_environment.py'}:show_a_digit"}
    made = run_toy(folder, "seer", NUM_STEPS, *SETTINGS, environment=names, script=TOOLS_SCRIPT)
    assert made.code == 0, made.output[-5000:]
    return made


def test_every_conversation_is_one_response_of_its_group(run: ToyRun) -> None:
    crashed = run.series("seer/tool_failures")
    assert sum(crashed) > 0
    assert run.series("seer/responses") == [64.0 - num for num in crashed]
    assert run.series("seer/failed_responses") == [0.0] * NUM_STEPS
    assert min(run.series("seer/turns_mean")) > 1
    assert max(run.series("num_turns/max")) == 2 * MOST_TURNS


def test_the_rewards_are_those_of_the_environment(run: ToyRun) -> None:
    assert all(0 < reward < 1 for reward in run.rewards)
    assert min(run.series("critic/score/min")) == 0.0, "conversations with a crashed tool"
    assert run.steps[-1]["val-core/toy/reward/mean@1"] >= 0


def test_only_what_the_model_said_is_trained_on(run: ToyRun) -> None:
    """Given tokens have log-probability 0 in the rollout, which no mask means a difference near 1."""
    assert max(run.series("training/rollout_probs_diff_max")) < 1e-6
    assert min(run.series("actor/grad_norm")) > 0
