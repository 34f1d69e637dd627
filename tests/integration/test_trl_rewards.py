# SPDX-License-Identifier: Apache-2.0
"""Rewards that begin as each response ends, while TRL believes they are computed afterwards."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("trl")

from seer.errors import ConfigError, InputError
from seer.integrations.trl import early_reward, seer_rollouts
from seer.metrics.events import Ended, Event
from seer.metrics.jsonl import EventLog
from trl_toy import Dataset, rewards_of, same_weights, share, share_of_kind, toy_trainer, weights_of

SMALL: dict[str, Any] = {"kv_blocks": 256, "block_size": 4, "max_num_seqs": 16}


def test_early_rewards_train_as_late_ones_do(tmp_path: Path) -> None:
    @early_reward
    async def early(prompt: str, completion: str, kind: str) -> float:
        assert prompt.startswith(kind)
        return share(completion, kind)

    with seer_rollouts(**SMALL, reward=early) as rollouts:
        one = toy_trainer(rollouts, tmp_path / "early", max_steps=3, reward_funcs=early)
        one.train()
    with seer_rollouts(**SMALL) as rollouts:
        other = toy_trainer(rollouts, tmp_path / "late", max_steps=3, reward_funcs=share_of_kind)
        other.train()
    assert rewards_of(one) == rewards_of(other)
    assert same_weights(weights_of(one), weights_of(other))
    assert "rewards/early/mean" in one.state.log_history[0]


def test_a_reward_begins_while_others_are_generated(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    order: list[str] = []
    write = EventLog.__call__

    def noted(log: EventLog, event: Event) -> None:
        if isinstance(event, Ended):
            order.append("ended")
        write(log, event)

    monkeypatch.setattr(EventLog, "__call__", noted)

    @early_reward
    async def noting(completion: str, kind: str, **row: Any) -> float:
        order.append("reward")
        return share(completion, kind)

    with seer_rollouts(**SMALL | {"max_num_seqs": 2}, reward=noting) as rollouts:
        toy_trainer(rollouts, tmp_path, max_steps=1, reward_funcs=noting).train()
    assert order.count("ended") == order.count("reward") == 32
    assert order.index("reward") < 8, "with two requests at a time most responses end later than the first"


def test_a_failing_and_a_hanging_reward_are_named_and_hold_nothing_up(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    never = asyncio.Event()
    calls: list[str] = []

    @early_reward
    async def picky(completion: str, kind: str, **row: Any) -> float:
        calls.append(kind)
        if len(calls) == 1:
            await never.wait()
        if len(calls) == 2:
            raise ValueError("no idea")
        return share(completion, kind)

    with seer_rollouts(**SMALL, reward=picky, reward_deadline_s=1.0) as rollouts:
        trainer = toy_trainer(rollouts, tmp_path, max_steps=2, reward_funcs=picky)
        trainer.train()
    assert len(calls) == 64
    assert trainer.state.log_history[0]["seer/reward_errors"] == 2
    assert "seer/reward_errors" not in trainer.state.log_history[1]
    printed = [record.getMessage() for record in caplog.records if record.name.startswith("seer.integrations")]
    assert any("reward picky of prompt" in line and "took longer than 1 s" in line for line in printed)
    assert any("reward picky of prompt" in line and "ValueError: no idea" in line for line in printed)


def test_a_reward_that_the_rollout_was_not_given_is_refused(tmp_path: Path) -> None:
    @early_reward
    def forgotten(completion: str, kind: str, **row: Any) -> float:
        return share(completion, kind)

    with seer_rollouts(**SMALL) as rollouts, pytest.raises(ConfigError, match="forgotten was not given"):
        toy_trainer(rollouts, tmp_path, max_steps=1, reward_funcs=forgotten).train()


def test_the_training_s_prompts_can_be_evaluated_and_those_of_no_dataset_are_refused(tmp_path: Path) -> None:
    @early_reward
    def reward(completion: str, kind: str, **row: Any) -> float:
        return share(completion, kind)

    with seer_rollouts(**SMALL, reward=reward) as rollouts:
        trainer = toy_trainer(rollouts, tmp_path, max_steps=1, reward_funcs=reward)
        assert 0.0 < trainer.evaluate(trainer.train_dataset)["eval_reward"] < 1.0
        with pytest.raises(InputError, match="in neither train_dataset nor eval_dataset"):
            trainer.evaluate(Dataset.from_list([{"prompt": "odd odd", "kind": "odd"}] * 8))


def test_rows_that_a_prompt_cannot_tell_apart_are_refused(tmp_path: Path) -> None:
    @early_reward
    def reward(completion: str, kind: str, **row: Any) -> float:
        return share(completion, kind)

    with seer_rollouts(**SMALL, reward=reward) as rollouts:
        trainer = toy_trainer(rollouts, tmp_path, max_steps=1, reward_funcs=reward)
        trainer.train_dataset = Dataset.from_list([{"prompt": "even", "kind": kind} for kind in ("even", "odd")] * 4)
        with pytest.raises(InputError, match="two rows with the same prompt"):
            trainer.train()
