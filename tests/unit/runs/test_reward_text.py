# SPDX-License-Identifier: Apache-2.0
"""What a reward function raises ends up in a results file, so it must fit one."""

from __future__ import annotations

import asyncio

import msgspec

from builders import a_response
from seer.runs.prompts import Prompt
from seer.runs.rewards import RewardCalls
from seer.runs.user_calls import UserCalls
from seer.types import Response


def test_half_a_character_in_an_error_of_a_reward_can_be_written() -> None:
    response = a_response()

    def reward(prompt: Prompt, response: Response) -> float:
        raise ValueError("bad \ud800 text")

    async def scenario() -> None:
        calls = RewardCalls(reward, UserCalls(), deadline_s=60.0)
        calls.begin(Prompt(token_ids=(1,), id="0"), response)
        await calls.settle((response,))

    asyncio.run(scenario())
    assert response.reward_error is not None
    assert "bad ? text" in response.reward_error
    msgspec.json.encode(response)
