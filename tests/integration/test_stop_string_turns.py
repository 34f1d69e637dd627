# SPDX-License-Identifier: Apache-2.0
"""Turns that end with a stop string, as tool calls do: the environment gets its say, and nothing is tokenized again."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import pytest

torch = pytest.importorskip("torch")

from chat_models import CHATML, make_tokenizer
from engines import a_chunk, an_engine, generate
from seer import Conversation, End, FinishReason, HostingConfig, Rollout, Sampling
from seer.engine.local.tiny import make_tiny_model
from seer.engine.local.tokenizer import decoder
from seer.environments.base import Answer
from seer.errors import InputError
from seer.types import Response

STOP = tuple("etaoinshr")
"""Letters: the model of random bytes writes one of them now and then."""
SAMPLING = Sampling(max_tokens=150, stop=STOP)
PROMPT = [{"role": "user", "content": "call a tool"}]


async def tool(conversation: Conversation) -> Answer:
    """Answers a call twice, then ends; the reward is the number of calls."""
    assert conversation.text.endswith(STOP) or conversation.finish_reason is FinishReason.LENGTH
    if conversation.turn == 3 or conversation.finish_reason is FinishReason.LENGTH:
        return End(reward=float(conversation.turn))
    return [{"role": "tool", "content": conversation.text[-1]}]


def test_a_stop_string_hands_over_and_tokens_are_those_of_one_turn_at_a_time(tmp_path: Path) -> None:
    model = make_tiny_model(tmp_path / "model", seed=7, vocab_size=262)
    make_tokenizer(model, CHATML, eos="<|im_end|>")
    decode = decoder(model)
    close = decode.func.__self__.encode("<|im_end|>")[0]  # type: ignore[attr-defined]

    async def scenario() -> list[Response]:
        settings: dict[str, Any] = {"kv_blocks": 128, "max_num_seqs": 4, "chunk_tokens": 16, "pool_bytes": 32 << 20}
        async with Rollout(model, instances=2, hosting=HostingConfig(pin_cores=False), **settings) as rollout:
            groups = rollout.run([PROMPT], n=6, sampling=SAMPLING, environment=tool)
            return [response async for group in groups for response in group.responses]

    responses = asyncio.run(scenario())
    prompt = decode.func.__self__.chat(PROMPT)  # type: ignore[attr-defined]
    plain = an_engine(model)
    assert any(response.reward == 3.0 for response in responses)
    for response in responses:
        for turn in response.turns:
            before = [*prompt, *response.token_ids[: turn.start]]
            ids = response.token_ids[turn.start : turn.end]
            if turn.kind == "given":
                assert ids[:1] == ([close] if turn is not response.turns[-1] else [])
                continue
            left = SAMPLING.max_tokens - sum(response.loss_mask[: turn.start])  # type: ignore[index]
            free = a_chunk(0, before, max_tokens=left, seed=response.seed, ignore_eos=False)
            expected = generate(plain, [free])[0].ids
            ends = [at for at in range(1, len(expected) + 1) if any(one in decode(expected[:at]) for one in STOP)]
            assert ids == expected[: ends[0] if ends else None]


def test_stop_strings_need_a_tokenizer(tmp_path: Path) -> None:
    rollout = Rollout(make_tiny_model(tmp_path / "model"))
    with pytest.raises(InputError, match="no tokenizer to find stop strings"):
        rollout.encode([[3, 4]], sampling=SAMPLING)
