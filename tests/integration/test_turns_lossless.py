# SPDX-License-Identifier: Apache-2.0
"""Conversations on the embedded engine: chunks, moves, drafts, waits and kills change no token and no log-probability.

That they happened is asserted, too. SEER_CONVERSATIONS=200 makes it the long test; -s shows what happened.
"""

from __future__ import annotations

import asyncio
import os
import signal
from collections import Counter, defaultdict, deque
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("torch")

import torch

from engines import an_engine
from scripted_environment import SAMPLING, Scripted, alone, script
from seer import HostingConfig, Rollout
from seer.engine.local.tiny import make_tiny_model
from seer.environments.base import Answer, Conversation, Reply
from seer.metrics.events import Event, Prefilling, Started, Stepped, Stopped
from seer.types import Response, Sampling

NUM_GROUPS, N = max(1, int(os.environ.get("SEER_CONVERSATIONS", "40")) // 5), 5
PROMPTS = [[3 + i % 80, 7, 11, 5 + i % 50, 9, *range(20, 20 + i % 7)] for i in range(NUM_GROUPS)]
ALIKE = replace(SAMPLING, temperature=0.3)
"""Siblings of a random model say similar things only when it is cold: then drafts from each other are accepted."""
Found = dict[tuple[int, int], Response]


@dataclass(frozen=True, slots=True)
class Happened:
    """What a rollout went through."""

    num_conversations: int
    turns: dict[int, int]
    """Conversations by their number of turns."""
    num_generated: int
    num_given: int
    num_chunks: int
    num_moves: int
    num_drafted: int
    num_accepted: int
    num_kills: int


def what_happened(found: Found, events: Sequence[Event], num_kills: int = 0) -> Happened:
    responses, starts = found.values(), [event for event in events if isinstance(event, Started)]
    steps = [event for event in events if isinstance(event, Stepped)]
    turns = Counter(sum(turn.kind == "generated" for turn in response.turns) for response in responses)
    return Happened(
        num_conversations=len(found),
        turns=dict(sorted(turns.items())),
        num_generated=sum(response.num_tokens for response in responses),
        num_given=sum(response.num_given_tokens for response in responses),
        num_chunks=len(starts),
        num_moves=sum(event.moved_from not in (None, event.instance) for event in starts),
        num_drafted=sum(event.num_drafted for event in steps),
        num_accepted=sum(event.num_accepted for event in steps),
        num_kills=num_kills,
    )


def check_all_happened(happened: Happened) -> None:
    assert {1, 2, 3, 4, 5} <= set(happened.turns) <= {1, 2, 3, 4, 5, 6}
    num_turns = sum(turns * conversations for turns, conversations in happened.turns.items())
    assert happened.num_chunks > num_turns, "no turn was cut into chunks"
    assert happened.num_moves > 0
    assert happened.num_drafted > happened.num_accepted > 0


class KillInTurn:
    """Kills one instance after the other, each time when all are up and some more chunks have ended."""

    def __init__(self, rollout: Rollout, *, every_chunks: int = NUM_GROUPS * N) -> None:
        self._instances, self._every_chunks = rollout.fleet.instances, every_chunks
        self._num_stopped = 0
        self.num_kills = 0

    def __call__(self, event: Event) -> None:
        self._num_stopped += isinstance(event, Stopped)
        if self._num_stopped >= self._every_chunks and all(one.is_up for one in self._instances):
            victim = self._instances[(self.num_kills + 1) % len(self._instances)]
            assert victim.pid is not None
            self._num_stopped = 0
            self.num_kills += 1
            os.kill(victim.pid, signal.SIGKILL)


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_tiny_model(tmp_path_factory.mktemp("model") / "tiny", seed=7)


def a_rollout(model: Path, instances: int = 2, **settings: Any) -> Rollout:
    defaults: dict[str, Any] = {"kv_blocks": 128, "max_num_seqs": 6, "chunk_tokens": 16, "pool_bytes": 32 << 20}
    hosting = HostingConfig(pin_cores=False, max_restarts=1000, restart_pause_s=0.0)
    return Rollout(model, instances=instances, hosting=hosting, **defaults | settings)


async def rolled_out(
    rollout: Rollout, environment: Scripted | None = None, *, sampling: Sampling = ALIKE, **settings: Any
) -> Found:
    groups = rollout.run(PROMPTS, n=N, sampling=sampling, environment=environment or Scripted(), **settings)
    return {(r.group, r.index): r async for group in groups for r in group.responses}


def check_against_one_at_a_time(model: Path, found: Found, *, num_groups: int = NUM_GROUPS) -> None:
    engine = an_engine(model, block_size=16, max_num_seqs=1)
    assert len(found) == num_groups * N
    for (group, _), response in found.items():
        spans = alone(engine, response, PROMPTS[group], ALIKE)
        assert response.token_ids == [token for span in spans for token in span.ids]
        assert response.loss_mask == [int(not span.is_given) for span in spans for _ in span.ids]
        sampled = [value for value, kept in zip(response.logprobs, response.loss_mask, strict=True) if kept]
        assert sampled == [value for span in spans for value in span.logprobs]
        assert response.reward == sum(not span.is_given for span in spans)
        assert response.is_complete


def test_two_instances_with_everything_on_equal_one_conversation_at_a_time(model: Path) -> None:
    events: list[Event] = []

    async def scenario() -> Found:
        async with a_rollout(model) as rollout:
            return await rolled_out(rollout, events=events.append)

    found = asyncio.run(scenario())
    check_against_one_at_a_time(model, found)
    happened = what_happened(found, events)
    print(happened)
    check_all_happened(happened)
    # Where KV is loaded after waits and moves, all of it is found, the last block too.
    # Instances report later than chunks start, each in its order.
    loads: defaultdict[tuple[int, int], deque[bool]] = defaultdict(deque)
    num_loaded = 0
    for event in events:
        if isinstance(event, Started):
            loads[event.request, event.instance].append(event.load_kv)
        elif isinstance(event, Prefilling) and loads[event.request, event.instance].popleft():
            num_loaded += event.num_loaded
            assert event.num_recomputed == 0
    assert num_loaded > 0


def test_chunks_moves_drafts_and_kills_together_change_nothing(model: Path) -> None:
    events: list[Event] = []

    async def scenario() -> tuple[Found, int]:
        async with a_rollout(model) as rollout:
            kill = KillInTurn(rollout)

            def both(event: Event) -> None:
                events.append(event)
                kill(event)

            found = await rolled_out(rollout, events=both)
            assert rollout.fleet.num_lost >= 1
            return found, kill.num_kills

    found, num_kills = asyncio.run(scenario())
    check_against_one_at_a_time(model, found)
    happened = what_happened(found, events, num_kills)
    print(happened)
    check_all_happened(happened)


def test_an_instance_that_dies_while_all_wait_for_their_tools_costs_nothing_that_was_computed(model: Path) -> None:
    """The pool outlives it, with the last blocks of turns that ended in their middle."""
    events: list[Event] = []
    num_waiting = 0

    async def scenario() -> Found:
        async with a_rollout(model, 1, max_num_seqs=N) as rollout:
            victim, all_wait, scripted = rollout.fleet.instances[0], asyncio.Event(), Scripted(longest_s=0.0)

            async def environment(conversation: Conversation) -> Answer:
                nonlocal num_waiting
                num_waiting += conversation.turn == 1
                if num_waiting == N and not all_wait.is_set():
                    assert victim.pid is not None
                    os.kill(victim.pid, signal.SIGKILL)
                    events.clear()
                    all_wait.set()
                await all_wait.wait()
                return await scripted(conversation)

            groups = rollout.run(PROMPTS[:1], n=N, sampling=ALIKE, environment=environment, events=events.append)
            found = {(r.group, r.index): r async for group in groups for r in group.responses}
            assert rollout.fleet.num_lost == 1
            return found

    found = asyncio.run(scenario())
    check_against_one_at_a_time(model, found, num_groups=1)
    prefilled = [event for event in events if isinstance(event, Prefilling)]
    assert sum(event.num_loaded for event in prefilled) > 0
    assert sum(event.num_recomputed for event in prefilled) == 0


def test_tokens_that_the_model_does_not_have_fail_their_response_in_runs_and_sessions(model: Path) -> None:
    async def environment(conversation: Conversation) -> Answer:
        return Reply(token_ids=[1 << 20])

    async def scenario() -> list[Response]:
        async with a_rollout(model, 1) as rollout:
            groups = rollout.run(PROMPTS[:1], sampling=ALIKE, environment=environment)
            responses = [response async for group in groups for response in group.responses]
            async with rollout.session() as session:
                [handle] = session.submit(PROMPTS[0], sampling=ALIKE, environment=environment)
                return [*responses, await handle]

    for response in asyncio.run(scenario()):
        assert "it gave token ids from 1048576" in (response.error or "")


@pytest.mark.parametrize("settings", [{"pool_bytes": 0, "scheduler": "divided"}, {"scheduler": "verl"}])
def test_without_a_pool_and_under_other_schedulers_it_is_computed_again_and_equal(
    model: Path, settings: dict[str, Any]
) -> None:
    async def scenario() -> Found:
        async with a_rollout(model, **settings) as rollout:
            return await rolled_out(rollout, Scripted(longest_s=0.0))

    check_against_one_at_a_time(model, asyncio.run(scenario()))


def test_log_probabilities_and_masks_agree_with_a_plain_forward_pass_of_transformers(model: Path) -> None:
    transformers = pytest.importorskip("transformers")
    plain = transformers.LlamaForCausalLM.from_pretrained(model, dtype=torch.float32)

    async def scenario() -> Found:
        async with a_rollout(model, 1) as rollout:
            return await rolled_out(rollout, sampling=SAMPLING)

    for (group, index), response in list(asyncio.run(scenario()).items())[:20]:
        ids = torch.tensor([[*PROMPTS[group], *response.token_ids]])
        with torch.inference_mode():
            logprobs = plain(ids).logits[0].log_softmax(-1)
        scored = logprobs[len(PROMPTS[group]) - 1 : -1].gather(1, ids[0, len(PROMPTS[group]) :, None])[:, 0]
        mask = torch.tensor(response.loss_mask)
        assert torch.allclose(scored * mask, torch.tensor(response.logprobs), atol=2e-4)
        given = [turn for turn in response.turns if turn.kind == "given" and turn.end > turn.start]
        for number, turn in enumerate(given, start=1):
            assert response.token_ids[turn.start : turn.end] == script((group, index), number)
            assert not mask[turn.start : turn.end].any()
        assert int(mask.sum()) == response.num_tokens
