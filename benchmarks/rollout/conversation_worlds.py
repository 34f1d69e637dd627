# SPDX-License-Identifier: Apache-2.0
"""What the conversations of conversations.py are about: prompts, and the environment that answers after each turn.

    RandomWorld   token ids that mean nothing, for random weights; a turn ends at one of many stop tokens
    PriceList     a long list of prices and questions about it, one after another, which a real model answers with the
                  Python tool; each conversation has a list of its own

Invariant: a world is a function of its settings and the conversation's number. So every way of treating KV has the same
prompts, questions and tool times.
"""

from __future__ import annotations

import argparse
import asyncio
import random
import re
from typing import Any

from seer import Conversation, End, FinishReason, Reply, Sampling
from seer.environments.base import Answer
from seer.environments.python_sandbox import SandboxLimits, ToolError
from seer.environments.python_tool import PythonTool

VOCABULARY, END_TOKEN = 512, 2
ADJECTIVES = ("red", "green", "blue", "old", "new", "small", "large", "round", "flat", "light", "dark", "heavy")
NOUNS = ("lamp", "chair", "table", "brush", "clock", "bottle", "basket", "ladder", "hammer", "kettle", "mirror", "rope")
INSTRUCTIONS = (
    "You are a shop assistant. Answer every question about the price list by writing one short Python program in a "
    "```python block that prints the total. You then see what it printed; reply with the total after '####'."
)
TOKENS_OF_A_LINE = 13
"""Of the list, with Qwen's tokenizer."""
MOST_CODE_TURNS = 3
"""Programs for one question; then the next question is asked."""


class RandomWorld:
    """Answers with random tokens after a while."""

    tools = None

    def __init__(self, args: argparse.Namespace) -> None:
        self._args = args
        # Turns end after a number of tokens, not by what random weights say: each is a whole lease of the limit.
        stops = tuple(range(3, VOCABULARY, args.rarity))
        self.sampling = Sampling(max_tokens=args.turns * args.generated, stop_token_ids=stops)

    def prompt(self, number: int) -> Any:
        """Token ids."""
        dice = random.Random(number)
        return [dice.randrange(3, VOCABULARY) for _ in range(self._args.prompt)]

    async def __call__(self, conversation: Conversation) -> Answer:
        """Sleep, then some tokens."""
        args = self._args
        dice = random.Random(f"{conversation.prompt_token_ids} {conversation.turn}")
        await asyncio.sleep(dice.uniform(*args.tool_s))
        if conversation.turn == args.turns:
            return End(reward=1.0)
        return Reply(token_ids=[dice.randrange(3, VOCABULARY) for _ in range(args.given)])


class PriceList:
    """Questions about a list of prices; code in a turn is run, a turn without code gets the next question."""

    tools = None  # the instructions ask for a fence, which small models write more reliably than a call

    def __init__(self, args: argparse.Namespace) -> None:
        self._args = args
        self.sampling = Sampling(max_tokens=args.turns * args.generated, temperature=args.temperature)
        limits = SandboxLimits(time_s=10.0, max_output_bytes=2048, max_processes=args.max_processes)
        self._python = PythonTool(lambda _: None, limits=limits, most_calls=10**6)

    def prompt(self, number: int) -> Any:
        """The list and the first question, as messages."""
        prices = self._prices(number)
        listed = "\n".join(f"- {name}: {price} coins" for name, price in prices.items())
        first = f"Price list of shop {number}:\n{listed}\n\n{self._question(number, 0)[0]}"
        return [{"role": "system", "content": INSTRUCTIONS}, {"role": "user", "content": first}]

    async def __call__(self, conversation: Conversation) -> Answer:
        """Run the turn's code after a while, or ask the next question; the reward is the share of right totals."""
        number = self._number(conversation)
        dice = random.Random(f"{number} {conversation.turn}")
        await asyncio.sleep(dice.uniform(*self._args.tool_s))
        asked, num_programs, right = self._so_far(conversation, number)
        is_over = conversation.turn >= self._args.turns or conversation.finish_reason is FinishReason.LENGTH
        if is_over:
            return End(reward=right / asked)
        if num_programs <= MOST_CODE_TURNS:
            answer = await self._run(conversation)
            if not isinstance(answer, End):
                return answer
        return [{"role": "user", "content": self._question(number, asked)[0]}]

    async def _run(self, conversation: Conversation) -> Answer:
        try:
            return await self._python(conversation)
        except ToolError as error:
            return [{"role": "tool", "content": str(error)}]

    def _so_far(self, conversation: Conversation, number: int) -> tuple[int, int, int]:
        """Questions asked, programs since the newest, and right totals."""
        asked = programs = right = 0
        for message in conversation.messages:
            if message["role"] == "user":
                asked, programs = asked + 1, 0
            elif message["role"] == "assistant":
                found = re.findall(r"####\s*(\d+)", message["content"])
                if found and int(found[-1]) == self._question(number, asked - 1)[1]:
                    right += 1
                programs += 1
        return asked, programs, right

    def _number(self, conversation: Conversation) -> int:
        found = re.search(r"shop (\d+):", conversation.messages[1]["content"])
        assert found is not None, "the prompt is this world's"
        return int(found.group(1))

    def _prices(self, number: int) -> dict[str, int]:
        dice = random.Random(number)
        prices: dict[str, int] = {}
        while len(prices) < max(4, self._args.prompt // TOKENS_OF_A_LINE):
            name = f"{dice.choice(ADJECTIVES)} {dice.choice(NOUNS)} {dice.randrange(1000)}"
            prices[name] = dice.randrange(3, 400)
        return prices

    def _question(self, number: int, index: int) -> tuple[str, int]:
        dice = random.Random(f"{number} {index}")
        prices = self._prices(number)
        bought = [(name, dice.randrange(2, 9)) for name in dice.sample(sorted(prices), 3)]
        listed = ", ".join(f"{count} x {name}" for name, count in bought)
        return f"What is the total price of {listed}?", sum(prices[name] * count for name, count in bought)
