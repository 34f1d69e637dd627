# SPDX-License-Identifier: Apache-2.0
"""Rollout servers are killed in the middle of a rollout, after it and during a weight sync, in one run of verl.

Stock verl ends at the first of them. Agent loops have two turns here: each response of the driver is one of them.
Dynamic sampling drops groups without a signal and asks for others in the same rollout.

A round is four steps and has each kind of death once. Most of its time is four starts of vLLM, two of them at once.

    step    rollout                     asleep           then
    1       server 1 dies               server 0 dies    both are back before the weights come
    2                                                    server 1 dies in the training
    3       server 0 alone              1 is back        server 0 dies by the weights, which 1 gets
    4       server 1 alone              0 is back
"""

from __future__ import annotations

import os
from pathlib import Path

import pytest

pytest.importorskip("verl")

from verl_toy import ToyRun, make_toy, run_toy

ROUND = (("rollout", 1, 1), ("sleep", 0, 1), ("between", 1, 2), ("sync", 0, 3))
"""Kind, replica, step."""
ROUND_STEPS = 4
NUM_ROUNDS = int(os.environ.get("SEER_VERL_DEATHS", "1"))
"""Each kind of death so many times."""
NUM_STEPS = ROUND_STEPS * NUM_ROUNDS + 1
"""In the last one the server that died last takes part again."""
DEATHS = [
    f"{kind}:{replica}@{step + ROUND_STEPS * number}" for number in range(NUM_ROUNDS) for kind, replica, step in ROUND
]
NUM_TURNS = 2
NUM_PROMPTS, NUM_SIBLINGS = 8, 4
SEER = tuple(f"+actor_rollout_ref.rollout.custom.seer.{one}" for one in ("chunk_tokens=32", "kv_blocks=64"))
DYNAMIC = (
    f"actor_rollout_ref.rollout.n={NUM_SIBLINGS}",
    "algorithm.filter_groups.enable=True",
    "algorithm.filter_groups.metric=reward",
)
DROPPED = ("training/filter_groups/evicted_samples", "training/filter_groups/discarded_surplus_samples")
"""verl's counts of groups that were rolled out and not trained on; absent where there were none."""


def run_with_deaths(folder: Path) -> ToyRun:
    make_toy(folder, hopeless_every=5)
    (folder / "killed").mkdir()
    environment = {
        "VERL_USE_EXTERNAL_MODULES": "verl_cpu,verl_kills",
        "SEER_KILLS": ",".join(DEATHS),
        "SEER_KILLED": str(folder / "killed"),
    }
    loops = folder / "two_turns.yaml"
    loops.write_text("- name: two_turns\n  _target_: verl_two_turns.TwoTurns\n")
    agent = "actor_rollout_ref.rollout.agent"
    turns = (f"{agent}.agent_loop_config_path={loops}", f"{agent}.default_agent_loop=two_turns")
    return run_toy(folder, "seer", NUM_STEPS, *SEER, *turns, *DYNAMIC, environment=environment)


def test_every_response_comes_and_the_server_returns_with_the_newest_weights(tmp_path: Path) -> None:
    run = run_with_deaths(tmp_path)
    assert run.code == 0, run.output[-5000:]
    assert sorted(path.name for path in (tmp_path / "killed").iterdir()) == sorted(DEATHS)
    dropped = [sum(step.get(name, 0.0) for name in DROPPED) for step in run.steps]
    expected = [NUM_TURNS * NUM_SIBLINGS * (NUM_PROMPTS + num) for num in dropped]
    assert run.series("seer/responses") == expected
    assert run.series("seer/failed_responses") == [0.0] * NUM_STEPS
    assert "Error in _run_prompt" not in run.output, "verl trained around a prompt that failed"
    assert len(expected) == NUM_STEPS
    assert sum(dropped) > 0
    assert run.series("seer/servers_lost")[-1] == len(DEATHS)
    assert run.series("seer/servers_up")[-1] == 2, "the last of them is back"
    assert max(run.series("training/rollout_probs_diff_max")) < 1e-6
