# SPDX-License-Identifier: Apache-2.0
"""GRPO with an environment: given tokens are masked, its rewards are TRL's, and a broken tool ends no training."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("trl")

from seer import Conversation, End, FinishReason, Reply
from seer.environments.base import Answer
from seer.errors import ConfigError
from seer.integrations.trl import environment_reward, seer_rollouts
from trl_toy import WORDS, rewards_of, share, toy_trainer

SMALL: dict[str, Any] = {"kv_blocks": 256, "block_size": 4, "max_num_seqs": 16}
HINT = [WORDS.index("now"), WORDS.index("even")]


async def hint_once(conversation: Conversation) -> Answer:
    """After the first turn, two words; after the second, the reward."""
    assert conversation.messages[0]["content"].startswith(conversation.row["kind"])
    if conversation.turn == 1 and conversation.finish_reason is FinishReason.STOP:
        return Reply(token_ids=HINT)
    words = [WORDS[token] for turn in conversation.turns if turn.kind == "generated"
             for token in conversation.token_ids[turn.start : turn.end]]  # fmt: skip
    return End(reward=share(" ".join(words), conversation.row["kind"]))


def test_given_tokens_are_masked_and_the_environments_rewards_are_trained_on(tmp_path: Path) -> None:
    seen: list[dict[str, Any]] = []
    with seer_rollouts(**SMALL, environment=hint_once) as rollouts:

        def noting(prompts: list[Any], trainer: Any) -> Any:
            seen.append(rollouts(prompts, trainer))
            return dict(seen[-1])

        trainer = toy_trainer(noting, tmp_path, max_steps=3, reward_funcs=environment_reward)
        trainer.train()
    assert len(rewards_of(trainer)) == 3
    assert "rewards/environment_reward/mean" in trainer.state.log_history[0]
    num_given = 0
    for columns in seen:
        rows = zip(columns["completion_ids"], columns["env_mask"], columns["logprobs"], strict=True)
        for ids, mask, logprobs in rows:
            assert len(ids) == len(mask) == len(logprobs)
            given = [token for token, kept in zip(ids, mask, strict=True) if not kept]
            assert given in ([], HINT)
            num_given += len(given)
    assert num_given > 0
    numbers = trainer.state.log_history[0]
    assert any("seer" in name for name in numbers)


def test_a_tool_that_fails_masks_its_response_and_training_goes_on(tmp_path: Path) -> None:
    async def fragile(conversation: Conversation) -> Answer:
        if conversation.index == 3:
            raise RuntimeError("the tool is down")
        return await hint_once(conversation)

    masks: list[list[int]] = []
    with seer_rollouts(**SMALL, environment=fragile, check_responses=0) as rollouts:

        def noting(prompts: list[Any], trainer: Any) -> Any:
            columns = rollouts(prompts, trainer)
            masks.extend(
                mask for mask, reward in zip(columns["env_mask"], columns["seer_reward"], strict=True) if reward is None
            )
            return columns

        trainer = toy_trainer(noting, tmp_path, max_steps=1, reward_funcs=environment_reward)
        trainer.train()
    assert masks
    assert not any(any(mask) for mask in masks)


def test_what_is_no_environment_is_refused() -> None:
    with pytest.raises(ConfigError, match="not an async function"):
        seer_rollouts(environment=lambda conversation: None)  # type: ignore[arg-type, return-value]
    with pytest.raises(ConfigError, match="no environment"):
        environment_reward(completions=[])
