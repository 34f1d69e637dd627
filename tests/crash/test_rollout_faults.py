"""Rollouts while somebody kills and stops processes at random: every token is there once, and nothing hangs.

Rounds are few by default; SEER_FAULT_ROUNDS=200 is the long form (`make test-faults`).
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import random
import signal
from collections.abc import Callable
from pathlib import Path

import pytest

pytest.importorskip("torch")

from seer import FinishReason, GroupRecord, HostOptions, Rollout, Sampling
from seer.engine.local.tiny import make_tiny_model
from seer.metrics.events import Event, Started, Stopped

ROUNDS = int(os.environ.get("SEER_FAULT_ROUNDS", "4"))
ROUND_DEADLINE_S = 120.0
PROMPTS = [[3 + i, 7, 11] for i in range(5)]
SAMPLING = Sampling(max_tokens=64)
HOSTING = HostOptions(
    pin=False, heartbeat_s=0.2, silence_deadline_s=3.0, progress_deadline_s=20.0, max_restarts=10 * ROUNDS
)
Tokens = dict[tuple[int, int], list[int]]


def tokens_of(groups: list[GroupRecord]) -> Tokens:
    return {(r.group, r.index): r.token_ids for group in groups for r in group.responses}


def a_rollout(model: Path, instances: int) -> Rollout:
    return Rollout(
        model,
        instances=instances,
        kv_blocks=256,
        max_running=6,
        chunk_tokens=16,
        pool_bytes=8 << 20,
        hosting=HOSTING,
    )


async def rolled_out(rollout: Rollout, events: Callable[[Event], None], seed: int) -> list[GroupRecord]:
    async with asyncio.timeout(ROUND_DEADLINE_S):
        return [g async for g in rollout.run(PROMPTS, n=3, sampling=SAMPLING, events=events, seed=seed)]


def strike(rollout: Rollout, rng: random.Random) -> str:
    """Do one thing that no program should have to bear."""
    kind = rng.choice(["kill one", "kill all", "stop one", "kill the draft server"])
    up = [instance for instance in rollout.fleet.instances if instance.pid is not None]
    if kind == "kill the draft server":
        server = rollout.fleet.draft_server
        if server is not None and server.pid is not None:
            with contextlib.suppress(ProcessLookupError):
                os.kill(server.pid, signal.SIGKILL)
        return kind
    victims = up if kind == "kill all" else [rng.choice(up)] if up else []
    for victim in victims:
        assert victim.pid is not None
        with contextlib.suppress(ProcessLookupError):  # an earlier strike may have ended it unnoticed so far
            os.kill(victim.pid, signal.SIGSTOP if kind == "stop one" else signal.SIGKILL)
    return kind


def test_no_fault_loses_doubles_or_changes_a_token(tmp_path: Path) -> None:
    model = make_tiny_model(tmp_path / "tiny")
    rng = random.Random(ROUNDS)

    async def undisturbed(num_seeds: int) -> list[Tokens]:
        async with a_rollout(model, 1) as rollout:
            return [tokens_of(await rolled_out(rollout, lambda event: None, seed)) for seed in range(num_seeds)]

    async def disturbed(expected: list[Tokens]) -> list[str]:
        strikes: list[str] = []
        async with a_rollout(model, 2) as rollout:
            for number in range(ROUNDS):
                moments = {rng.randrange(2, 40) for _ in range(rng.choice([1, 1, 2]))}
                seen = 0

                def on_event(event: Event, moments: set[int] = moments) -> None:
                    nonlocal seen
                    if isinstance(event, Started | Stopped):
                        seen += 1
                        if seen in moments:
                            strikes.append(strike(rollout, rng))

                seed = number % len(expected)
                groups = await rolled_out(rollout, on_event, seed)
                assert tokens_of(groups) == expected[seed], f"round {number}, after {strikes}"
                reasons = {r.reason for g in groups for r in g.responses}
                assert reasons <= {FinishReason.STOP, FinishReason.LENGTH}, f"round {number}, after {strikes}"
        return strikes

    expected = asyncio.run(undisturbed(min(ROUNDS, 3)))
    assert asyncio.run(disturbed(expected))
