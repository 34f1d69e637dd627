# SPDX-License-Identifier: Apache-2.0
"""Two environments that run what the model writes in the Python sandbox, and score its last turn.

    PythonTool    for chat models: code in a Markdown fence is run, and what it printed is given back
    SumTool       for the tiny model, whose tokens are digits and signs: a turn like 12+30 is a call

A turn without a call is the answer. Both find the right answer in the row of the dataset.
"""

from __future__ import annotations

import random
import re
from typing import Any

from seer import Conversation, End, FinishReason
from seer.environments.base import Answer
from seer.environments.python_sandbox import PythonSandbox, SandboxLimits
from seer.environments.python_tool import PythonTool

CALLED, NUMBER = 0.3, 0.1
"""Parts of the reward for a call and for a number, so that a model that is never right has something to learn from."""
ASK = (
    "Write Python code in a ```python block that prints the answer. You are then shown what it printed. "
    "Answer with the number alone."
)
_SUM = re.compile(r"(0|[1-9]\d*)([+-](0|[1-9]\d*))+")


def score(conversation: Conversation) -> float:
    """1 for the right number at the end; otherwise something for a call and for a number."""
    numbers = re.findall(r"-?\d+", conversation.text)
    if numbers and int(numbers[-1]) == conversation.row["answer"]:
        return 1.0
    return CALLED * (conversation.turn > 1) + NUMBER * bool(numbers)


def chat_tool() -> PythonTool:
    """For chat models."""
    return PythonTool(score, limits=SandboxLimits(time_s=5.0), most_calls=2)


class SumTool:
    """For the tiny model."""

    def __init__(self, most_calls: int = 2) -> None:
        self._sandbox = PythonSandbox(SandboxLimits(time_s=5.0))
        self._most_calls = most_calls

    async def __call__(self, conversation: Conversation) -> Answer:
        """Compute the newest turn if it is a sum; otherwise it is the answer."""
        is_full = conversation.finish_reason is FinishReason.LENGTH
        if is_full or conversation.turn > self._most_calls or not _SUM.fullmatch(conversation.text):
            return End(reward=score(conversation))
        printed = await self._sandbox.run(f"print({conversation.text})")
        return [{"role": "tool", "content": printed.strip()}]


def word_problems(num: int, seed: int) -> list[dict[str, Any]]:
    """Short problems in the style of GSM8K; prompts are unique."""
    dice = random.Random(seed)
    rows: dict[str, int] = {}
    while len(rows) < num:
        have, bags, each, lost = dice.randint(10, 99), dice.randint(2, 9), dice.randint(3, 14), dice.randint(1, 9)
        story = f"Mia has {have} cards. She buys {bags} bags with {each} cards each and loses {lost} cards."
        rows[f"{story} How many cards does she have now? {ASK}"] = have + bags * each - lost
    return [{"prompt": [{"role": "user", "content": text}], "answer": answer} for text, answer in rows.items()]


def sums(num: int, seed: int) -> list[dict[str, Any]]:
    """Sums of two small numbers, for the tiny model."""
    dice = random.Random(seed)
    rows: dict[str, int] = {}
    while len(rows) < num:
        first, second = dice.randint(0, 9), dice.randint(0, 9)
        rows[f"{first}+{second}"] = first + second
    return [{"prompt": [{"role": "user", "content": text}], "answer": answer} for text, answer in rows.items()]
