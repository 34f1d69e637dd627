# SPDX-License-Identifier: Apache-2.0
"""Adapters for environments that people use: text games and reasoning-gym."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from seer.environments.base import Answer, Conversation, End
from seer.environments.reasoning_tasks import ReasoningTasks, find_answer
from seer.environments.text_games import TextGame
from seer.types import FinishReason


def a_conversation(*turns: str, group: int = 0, index: int = 0, is_full: bool = False) -> Conversation:
    """After these turns of the model, with an answer between each two."""
    messages: list[dict[str, str]] = [{"role": "user", "content": "begin"}]
    for turn in turns:
        messages += [{"role": "assistant", "content": turn}, {"role": "user", "content": "go on"}]
    return Conversation(
        group=group,
        prompt_id=str(group),
        index=index,
        seed=7,
        turn=len(turns),
        prompt_token_ids=(1,),
        token_ids=(),
        turns=(),
        messages=messages[:-1],
        text=turns[-1],
        finish_reason=FinishReason.LENGTH if is_full else FinishReason.STOP,
        room_tokens=100,
    )


class Guess:
    """Guess a number; a try costs a tenth."""

    closed = 0

    def reset(self, *, seed: int | None = None) -> tuple[str, dict[str, Any]]:
        self.number = (seed or 0) + 3
        return "guess", {}

    def step(self, action: str) -> tuple[str, float, bool, bool, dict[str, Any]]:
        won = int(action) == self.number
        return "higher" if int(action) < self.number else "lower", 1.0 if won else -0.1, won, False, {}

    def close(self) -> None:
        Guess.closed += 1


class AsyncGuess(Guess):
    async def step(self, action: str) -> Any:  # type: ignore[override]
        await asyncio.sleep(0)
        return Guess.step(self, action)


@pytest.mark.parametrize("kind", [Guess, AsyncGuess])
def test_a_game_is_played_turn_by_turn_and_its_rewards_add_up(kind: type[Guess]) -> None:
    async def scenario() -> list[Answer]:
        game = TextGame(lambda conversation: kind())
        answers = [await game(a_conversation(*"123"[: i + 1])) for i in range(3)]
        Guess.closed = 0
        game.close((0, 0))
        game.close((0, 0))
        assert Guess.closed == 1
        return answers

    first, second, last = asyncio.run(scenario())
    assert first == second == [{"role": "user", "content": "higher"}]
    assert last == End(reward=0.8)


def test_a_game_that_is_missing_is_played_again_from_the_messages() -> None:
    answer = asyncio.run(TextGame(lambda conversation: Guess())(a_conversation("1", "2", "3")))
    assert answer == End(reward=0.8)
    cut = asyncio.run(TextGame(lambda conversation: Guess())(a_conversation("1", is_full=True)))
    assert cut == End(reward=-0.1)


def test_games_of_a_group_are_the_same_and_moves_that_make_no_sense_raise() -> None:
    game = TextGame(lambda conversation: Guess())
    for index in range(2):
        assert asyncio.run(game(a_conversation("4", group=1, index=index))) == End(reward=1.0)
    with pytest.raises(ValueError, match="invalid literal"):
        asyncio.run(game(a_conversation("many", group=2)))


def test_tasks_of_reasoning_gym_are_prompts_and_rewards() -> None:
    reasoning_gym = pytest.importorskip("reasoning_gym")
    dataset = reasoning_gym.create_dataset("basic_arithmetic", size=3, seed=1)
    tasks = ReasoningTasks(dataset, most_attempts=2)
    assert [prompt[0]["content"] for prompt in tasks.prompts()] == [dataset[i]["question"] for i in range(3)]
    right = f"I think.\n<answer>{dataset[2]['answer']}</answer>"
    assert asyncio.run(tasks(a_conversation(right, group=2))) == End(reward=1.0)
    again = asyncio.run(tasks(a_conversation("<answer>no</answer>", group=2)))
    assert again == [{"role": "user", "content": "That is not right. Try again."}]
    assert asyncio.run(tasks(a_conversation("wrong", right, group=2))) == End(reward=1.0)
    last = asyncio.run(tasks(a_conversation("wrong", "wrong too", group=2)))
    assert isinstance(last, End)
    assert (last.reward or 0.0) < 1.0


@pytest.mark.parametrize(
    ("text", "answer"),
    [("<answer> 4 </answer> then <answer>5</answer>", "5"), ("so\n it is 6 \n\n", "it is 6"), ("  ", None)],
)
def test_answers_are_found(text: str, answer: str | None) -> None:
    assert find_answer(text) == answer
