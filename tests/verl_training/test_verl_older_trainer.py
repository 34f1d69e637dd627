# SPDX-License-Identifier: Apache-2.0
"""verl's older trainer and its tool agent loop, in one run: turns that end with a stop token, a tool, and validation.

Every turn sends the whole history and joins its prompt's group late.
"""

from __future__ import annotations

import pytest

pytest.importorskip("verl")

from verl_toy import PLUGINS, ToyRun, make_toy, run_toy

NUM_STEPS = 2
ROLLOUT = "actor_rollout_ref.rollout"
OLDER = (
    "trainer.use_v1=False",
    f"+{ROLLOUT}.agent.agent_loop_manager_class=seer.integrations.verl.agent_loops.SeerAgentLoops",
    f"trainer.test_freq={NUM_STEPS}",
)
TOOLS = (
    f"{ROLLOUT}.agent.default_agent_loop=tool_agent",
    f"{ROLLOUT}.multi_turn.enable=True",
    f"{ROLLOUT}.multi_turn.format=toy",
    f"{ROLLOUT}.multi_turn.max_assistant_turns=3",
    f"{ROLLOUT}.multi_turn.function_tool_path={PLUGINS / 'verl_toy_tools.py'}",
)
SEER = tuple(f"+{ROLLOUT}.custom.seer.{one}" for one in ("chunk_tokens=16", "kv_blocks=64"))


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> ToyRun:
    folder = tmp_path_factory.mktemp("older")
    make_toy(folder)
    made = run_toy(folder, "seer", NUM_STEPS, *OLDER, *TOOLS, *SEER)
    assert made.code == 0, made.output[-5000:]
    return made


def test_it_trains_on_policy(run: ToyRun) -> None:
    assert len(run.rewards) == NUM_STEPS
    assert run.series("seer/weights_version") == [1.0, 2.0]
    assert max(run.series("training/rollout_probs_diff_max")) < 1e-6


def test_turns_are_responses_of_their_own(run: ToyRun) -> None:
    assert min(run.series("seer/responses")) > 64, "no agent loop had a second turn"
    assert max(run.series("num_turns/max")) > 2
    assert sum(run.series("seer/accepted_draft_tokens")) > 0


def test_it_validates(run: ToyRun) -> None:
    validated = [any(name.startswith("val-") for name in step) for step in run.steps]
    assert validated == [False, True]
