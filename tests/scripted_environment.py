# SPDX-License-Identifier: Apache-2.0
"""An environment whose answers are a function of the conversation and the turn, and conversations one at a time."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Sequence

import torch

from engines import a_chunk, generate
from seer.engine.local.engine import Engine
from seer.environments.base import Answer, Conversation, End, Key, Reply
from seer.types import FinishReason, Response, Sampling, TokenSpan

MOST_TURNS = 6
STOPS = tuple(range(90, 104))
"""Tokens that end a turn: the tiny model's turns have about ten tokens with these."""
SAMPLING = Sampling(max_tokens=120, stop_token_ids=STOPS)


def script(key: Key, turn: int) -> list[int] | None:
    """The tokens that are given after a turn; None ends the conversation."""
    group, _ = key
    if turn > random.Random(f"turns of {key}").randrange(MOST_TURNS):
        return None
    dice = random.Random(f"answer {group} {turn}")  # siblings see the same observation: drafts can come from it
    return [dice.randrange(3, 90) for _ in range(dice.randint(1, 30))]


class Scripted:
    """Answers after a time that differs from call to call."""

    def __init__(self, *, longest_s: float = 0.01) -> None:
        self._longest_s = longest_s
        self.num_calls = 0

    async def __call__(self, conversation: Conversation) -> Answer:
        self.num_calls += 1
        await asyncio.sleep(random.Random(self.num_calls).random() * self._longest_s)
        given = script(conversation.key, conversation.turn)
        if given is None or conversation.finish_reason is FinishReason.LENGTH:
            return End(reward=float(conversation.turn))
        return Reply(token_ids=given)


def alone(engine: Engine, response: Response, prompt: Sequence[int], sampling: Sampling = SAMPLING) -> list[TokenSpan]:
    """The same conversation on an engine that runs nothing else, without pool, drafts or chunks."""
    spans: list[TokenSpan] = []
    turn = num_generated = 0
    with torch.inference_mode():
        while True:
            chunk = a_chunk(
                0,
                [*prompt, *(token for span in spans for token in span.ids)],
                max_tokens=sampling.max_tokens - num_generated,
                seed=response.seed,
                stop_token_ids=sampling.stop_token_ids,
                temperature=sampling.temperature,
                ignore_eos=False,
            )
            spans.append(generate(engine, [chunk])[0].span())
            num_generated += len(spans[-1].ids)
            turn += 1
            given = script((response.group, response.index), turn)
            if given is None or num_generated == sampling.max_tokens:
                return spans
            spans.append(TokenSpan(given, (), 0, is_given=True))
