# SPDX-License-Identifier: Apache-2.0
"""What an earlier epoch taught is used in a later one, and changes no token."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("torch")
pytest.importorskip("seer.drafting._index")

from seer import GroupResult, Prompt, Rollout, Sampling
from seer.engine.local.tiny import make_tiny_model
from seer.metrics.events import Event, Started, Stepped

PROMPTS = [Prompt(id=f"prompt {i}", token_ids=(1, 2, 3 + i), seed=i) for i in range(3)]
SAMPLING = Sampling(max_tokens=96, ignore_eos=True)


async def rolled_out(rollout: Rollout, n: int = 2, **known: Any) -> tuple[list[GroupResult], list[Event]]:
    events: list[Event] = []
    groups = [group async for group in rollout.run(PROMPTS, n=n, sampling=SAMPLING, events=events.append, **known)]
    return sorted(groups, key=lambda group: group.group), events


def tokens_of(groups: list[GroupResult]) -> list[list[int]]:
    return [response.token_ids for group in groups for response in group.responses]


def accepted_share(events: list[Event]) -> float:
    steps = [event for event in events if isinstance(event, Stepped)]
    num_drafted = sum(step.num_drafted for step in steps)
    assert num_drafted, "nothing was drafted"
    return sum(step.num_accepted for step in steps) / num_drafted


def test_past_responses_are_drafted_from_and_change_no_token(tmp_path: Path) -> None:
    async def scenario() -> None:
        async with Rollout(make_tiny_model(tmp_path / "tiny"), kv_blocks=256, max_num_seqs=8) as rollout:
            before, blind = await rolled_out(rollout)
            past = {group.prompt_id: [response.token_ids for response in group.responses] for group in before}
            knowing: list[Event] = []
            for _ in range(4):  # where drafting did not seem to pay, it is tried again within so many steps
                after, events = await rolled_out(rollout, past_responses=past)
                assert tokens_of(after) == tokens_of(before)
                knowing += events
            # The very responses that come were known, so drafts are right; random weights repeat little else.
            assert accepted_share(knowing) > 0.8
            assert accepted_share(blind) < 0.5

    asyncio.run(scenario())


def test_priors_say_which_prompt_is_long_before_any_response_has_ended(tmp_path: Path) -> None:
    async def scenario() -> None:
        async with Rollout(make_tiny_model(tmp_path / "tiny"), kv_blocks=256, max_num_seqs=1) as rollout:
            for longest in (0, 2):
                length_hints = {prompt.id: 90 if i == longest else 10 for i, prompt in enumerate(PROMPTS)}
                _, events = await rolled_out(rollout, n=1, length_hints=length_hints)
                first = next(event for event in events if isinstance(event, Started))
                assert first.request == longest, "one at a time, and the longest goes first"

    asyncio.run(scenario())
