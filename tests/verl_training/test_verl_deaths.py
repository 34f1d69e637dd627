# SPDX-License-Identifier: Apache-2.0
"""A rollout server is killed in the middle of a rollout, after it and during a weight sync, in one run of verl.

Stock verl ends at the first of them. Agent loops have two turns here: each response of the driver is one of them.
"""

from __future__ import annotations

import os
from pathlib import Path

import pytest

pytest.importorskip("verl")

from verl_toy import make_toy, run_toy

KINDS = ("sync", "rollout", "between", "sleep")
NUM_ROUNDS = int(os.environ.get("SEER_VERL_DEATHS", "1"))
"""Each kind of death so many times."""
NUM_STEPS = 6 * NUM_ROUNDS + 1
"""After a death by `sync` or `between` the server misses a step."""
NUM_TURNS = 2
SEER = tuple(f"+actor_rollout_ref.rollout.custom.seer.{one}" for one in ("chunk_tokens=32", "kv_blocks=64"))


def test_every_response_comes_and_the_server_returns_with_the_newest_weights(tmp_path: Path) -> None:
    make_toy(tmp_path)
    killed = tmp_path / "killed"
    killed.mkdir()
    environment = {
        "VERL_USE_EXTERNAL_MODULES": "verl_cpu,verl_kills",
        "SEER_KILLS": ",".join(KINDS * NUM_ROUNDS),
        "SEER_KILLED": str(killed),
    }
    loops = tmp_path / "two_turns.yaml"
    loops.write_text("- name: two_turns\n  _target_: verl_two_turns.TwoTurns\n")
    agent = "actor_rollout_ref.rollout.agent"
    turns = (f"{agent}.agent_loop_config_path={loops}", f"{agent}.default_agent_loop=two_turns")
    run = run_toy(tmp_path, "seer", NUM_STEPS, *SEER, *turns, environment=environment)
    assert run.code == 0, run.output[-5000:]
    assert len(list(killed.iterdir())) == len(KINDS) * NUM_ROUNDS
    assert run.series("seer/responses") == [NUM_TURNS * 64.0] * NUM_STEPS
    assert run.series("seer/servers_lost")[-1] == len(KINDS) * NUM_ROUNDS
    assert run.series("seer/servers_up")[-1] == 2, "the last of them is back"
    assert max(run.series("training/rollout_probs_diff_max")) < 1e-6
