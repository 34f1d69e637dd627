# SPDX-License-Identifier: Apache-2.0
"""Adapters for environments that people use: text games and reasoning-gym."""

from __future__ import annotations

import asyncio
import platform
import queue
import sys
import threading
from dataclasses import replace
from typing import Any, ClassVar

import pytest

from seer.environments.base import Answer, Conversation, End
from seer.environments.python_sandbox import SandboxLimits
from seer.environments.python_tool import PythonTool
from seer.environments.reasoning_tasks import ReasoningTasks, find_answer
from seer.environments.text_games import TextGame
from seer.errors import InputError
from seer.types import FinishReason


def a_conversation(
    *turns: str, asked: str = "begin", group: int = 0, index: int = 0, is_full: bool = False
) -> Conversation:
    """After these turns of the model, with an answer between each two."""
    messages: list[dict[str, str]] = [{"role": "user", "content": asked}]
    for turn in turns:
        messages += [{"role": "assistant", "content": turn}, {"role": "user", "content": "go on"}]
    return Conversation(
        group=group,
        prompt_id=str(group),
        index=index,
        seed=7,
        turn=len(turns),
        prompt_token_ids=tuple(asked.encode()),
        token_ids=(),
        turns=(),
        messages=messages[:-1],
        text=turns[-1],
        finish_reason=FinishReason.LENGTH if is_full else FinishReason.STOP,
        room_tokens=100,
    )


class Guess:
    """Guess a number; a try costs a tenth."""

    closed: ClassVar[queue.SimpleQueue[str]] = queue.SimpleQueue()

    def reset(self, *, seed: int | None = None) -> tuple[str, dict[str, Any]]:
        self.number = (seed or 0) + 3
        return "guess", {}

    def step(self, action: str) -> tuple[str, float, bool, bool, dict[str, Any]]:
        won = int(action) == self.number
        return "higher" if int(action) < self.number else "lower", 1.0 if won else -0.1, won, False, {}

    def close(self) -> None:
        Guess.closed.put(threading.current_thread().name)


class AsyncGuess(Guess):
    async def step(self, action: str) -> Any:  # type: ignore[override]
        await asyncio.sleep(0)
        return Guess.step(self, action)


@pytest.mark.parametrize("kind", [Guess, AsyncGuess])
def test_a_game_is_played_turn_by_turn_and_its_rewards_add_up(kind: type[Guess]) -> None:
    async def scenario() -> list[Answer]:
        game = TextGame(lambda conversation: kind(), seed_of=lambda conversation: conversation.group)
        answers = [await game(a_conversation(*"123"[: i + 1])) for i in range(3)]
        game.close((0, 0))
        game.close((0, 0))
        assert Guess.closed.get(timeout=60) == "seer-game-close"  # one that hangs does not stop the event loop
        assert Guess.closed.empty()
        return answers

    first, second, last = asyncio.run(scenario())
    assert first == second == [{"role": "user", "content": "higher"}]
    assert last == End(reward=0.8)


def test_a_game_that_is_missing_is_played_again_from_the_messages() -> None:
    answer = asyncio.run(TextGame(lambda conversation: Guess(), seed_of=lambda _: 0)(a_conversation("1", "2", "3")))
    assert answer == End(reward=0.8)
    cut = asyncio.run(TextGame(lambda conversation: Guess(), seed_of=lambda _: 0)(a_conversation("1", is_full=True)))
    assert cut == End(reward=-0.1)


def test_games_of_a_group_are_the_same_and_moves_that_make_no_sense_raise() -> None:
    game = TextGame(lambda conversation: Guess(), seed_of=lambda conversation: conversation.group)
    for index in range(2):
        assert asyncio.run(game(a_conversation("4", group=1, index=index))) == End(reward=1.0)
    with pytest.raises(ValueError, match="invalid literal"):
        asyncio.run(game(a_conversation("many", group=2)))


def test_a_prompt_has_its_own_game_wherever_it_stands() -> None:
    """In a slice, a later step, a session or a trainer it has another position."""
    seeds: list[int | None] = []

    class Seeded(Guess):
        def reset(self, *, seed: int | None = None) -> tuple[str, dict[str, Any]]:
            seeds.append(seed)
            return super().reset(seed=seed)

    game = TextGame(lambda conversation: Seeded())
    for group, asked in enumerate(["cave", "forest", "cave"]):
        asyncio.run(game(a_conversation("1", asked=asked, group=group)))
    assert seeds[0] == seeds[2] != seeds[1]
    assert all(seed is not None and 0 <= seed < 1 << 31 for seed in seeds)


def test_games_that_hang_keep_no_other_game_from_its_moves() -> None:
    """As many hang as asyncio's own threads could be, on any machine."""
    never = threading.Event()

    class Hangs(Guess):
        def step(self, action: str) -> Any:
            return never.wait()

    async def scenario() -> Answer:
        hangs, works = (
            TextGame(lambda conversation: Hangs()),
            TextGame(lambda conversation: Guess(), seed_of=lambda _: 0),
        )
        calls = [asyncio.create_task(hangs(a_conversation("3", index=index))) for index in range(40)]
        try:
            async with asyncio.timeout(30):
                return await works(a_conversation("3"))
        finally:
            never.set()
            for call in calls:
                call.cancel()

    assert asyncio.run(scenario()) == End(reward=1.0)


class Sums:
    """A dataset of three questions, two of them equal."""

    entries: ClassVar[list[dict[str, Any]]] = [
        {"question": "1+1?", "answer": "2"},
        {"question": "2+2?", "answer": "4"},
        {"question": "1+1?", "answer": "two"},
    ]

    def __len__(self) -> int:
        return len(self.entries)

    def __getitem__(self, index: int) -> dict[str, Any]:
        return self.entries[index]

    def score_answer(self, answer: str | None, entry: dict[str, Any]) -> float:
        return float(answer == entry["answer"])


def test_a_task_is_found_by_its_question_wherever_its_prompt_stands() -> None:
    tasks = ReasoningTasks(Sums())
    for group in range(4):
        assert asyncio.run(tasks(a_conversation("4", asked="2+2?", group=group))) == End(reward=1.0)
        assert asyncio.run(tasks(a_conversation("2", asked="2+2?", group=group))) == End(reward=0.0)
    assert asyncio.run(tasks(a_conversation("two", asked="1+1?"))) == End(reward=1.0)


def test_the_question_may_follow_other_messages_and_the_model_may_repeat_another() -> None:
    one = a_conversation("1+1?", "4", asked="2+2?")
    example = [{"role": "user", "content": "1+1?"}, {"role": "assistant", "content": "2"}]
    assert asyncio.run(ReasoningTasks(Sums())(replace(one, messages=[*example, *one.messages]))) == End(reward=1.0)
    within = ReasoningTasks(Sums(), question_of=lambda conversation: conversation.messages[0]["content"][-4:])
    assert asyncio.run(within(a_conversation("4", asked="Think well. 2+2?"))) == End(reward=1.0)


def test_a_prompt_without_a_task_is_refused_by_name() -> None:
    tasks = ReasoningTasks(Sums())
    with pytest.raises(InputError, match=r"prompt 5 asks '9\+9\?', which is none of the 3 tasks"):
        asyncio.run(tasks(a_conversation("18", asked="9+9?", group=5)))
    tokens_only = replace(a_conversation("18"), messages=[{"role": "assistant", "content": "18"}])
    with pytest.raises(InputError, match="prompt 0 has no text"):
        asyncio.run(tasks(tokens_only))


def test_tasks_of_reasoning_gym_are_prompts_and_rewards() -> None:
    reasoning_gym = pytest.importorskip("reasoning_gym")
    dataset = reasoning_gym.create_dataset("basic_arithmetic", size=3, seed=1)
    tasks = ReasoningTasks(dataset, most_attempts=2)
    assert [prompt[0]["content"] for prompt in tasks.prompts()] == [dataset[i]["question"] for i in range(3)]
    asked = dataset[2]["question"]
    right = f"I think.\n<answer>{dataset[2]['answer']}</answer>"
    assert asyncio.run(tasks(a_conversation(right, asked=asked))) == End(reward=1.0)
    again = asyncio.run(tasks(a_conversation("<answer>no</answer>", asked=asked)))
    assert again == [{"role": "user", "content": "That is not right. Try again."}]
    assert asyncio.run(tasks(a_conversation("wrong", right, asked=asked))) == End(reward=1.0)
    last = asyncio.run(tasks(a_conversation("wrong", "wrong too", asked=asked)))
    assert isinstance(last, End)
    assert (last.reward or 0.0) < 1.0


@pytest.mark.skipif(
    sys.platform != "linux" or platform.machine() != "x86_64", reason="the sandbox is of Linux on x86-64"
)
def test_the_python_tool_runs_code_and_scores_the_turn_without_it_in_a_thread() -> None:
    names: list[str] = []

    def score(conversation: Conversation) -> float:
        names.append(threading.current_thread().name)
        return float("42" in conversation.text)

    async def scenario() -> None:
        tool = PythonTool(score, limits=SandboxLimits(time_s=120.0), most_calls=1)
        code = "```python\nprint(6 * 7)\n```"
        assert await tool(a_conversation(code)) == [{"role": "tool", "name": "python", "content": "42\n"}]
        assert await tool(a_conversation(code, "It is 42.")) == End(reward=1.0)
        assert await tool(a_conversation(code, code)) == End(reward=0.0)  # no more calls

    asyncio.run(scenario())
    assert len(names) == 2
    assert threading.main_thread().name not in names  # a slow score does not stop the event loop


@pytest.mark.parametrize(
    ("text", "answer"),
    [("<answer> 4 </answer> then <answer>5</answer>", "5"), ("so\n it is 6 \n\n", "it is 6"), ("  ", None)],
)
def test_answers_are_found(text: str, answer: str | None) -> None:
    assert find_answer(text) == answer
