# SPDX-License-Identifier: Apache-2.0
"""Rollouts on instances that are killed, stopped, slowed down and disturbed at random (tests/strikes.py).

Every token is there once, nothing hangs, and nothing is left when the fleet is closed.
"""

from __future__ import annotations

import asyncio
import os
import random
import signal
import threading
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from commands import shared_files
from fault_campaign import ROUNDS, StrikesAt, Tally, Tokens, rng_of, tokens_of
from frame_proxy import proxied
from pools import a_mooncake_store
from strikes import STRIKES, send, stacks_of

pytest.importorskip("torch")

from seer import GroupResult, HostingConfig, Rollout, Sampling
from seer.engine.local.tiny import make_tiny_model
from seer.errors import SeerError
from seer.kvpool import supervise
from seer.metrics.events import Event
from vllm_engines import HEAD_DIM

VLLM_ROUNDS = ROUNDS // 25
MOONCAKE_ROUNDS = max(1, ROUNDS // 50)
LOCAL_ROUNDS = max(1, ROUNDS - VLLM_ROUNDS - MOONCAKE_ROUNDS - ROUNDS // 25)  # the rest: test_driver_faults.py
ROUNDS_PER_FLEET = 25
"""Then the fleet is closed, which must leave nothing, and a new one is started: a pool that was removed stays away."""
ROUND_DEADLINE_S = 900.0
NUM_SEEDS = 3
PROMPTS = [[3 + i, 7, 11] for i in range(5)]
SAMPLING = Sampling(max_tokens=64)
HOSTING = HostingConfig(
    pin_cores=False,
    start_deadline_s=200.0,
    call_deadline_s=200.0,
    heartbeat_s=0.2,
    silence_deadline_s=2.0,
    progress_deadline_s=20.0,
    max_restarts=10**6,
    restart_pause_s=0.0,
)
VLLM_HOSTING = replace(HOSTING, start_deadline_s=200.0, heartbeat_s=0.5, silence_deadline_s=10.0)
ON_VLLM = [name for name in STRIKES if name not in ("kill all instances", "take memory from an instance")]


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_tiny_model(tmp_path_factory.mktemp("model") / "tiny", head_dim=HEAD_DIM)


def a_rollout(model: Path, **settings: Any) -> Rollout:
    defaults: dict[str, Any] = {"instances": 2, "kv_blocks": 256, "max_num_seqs": 6, "chunk_tokens": 16}
    return Rollout(model, **defaults | {"pool_bytes": 8 << 20, "hosting": HOSTING} | settings)


async def rolled_out(
    rollout: Rollout, events: Callable[[Event], None], seed: int, sampling: Sampling
) -> list[GroupResult]:
    async with asyncio.timeout(None) as limit:
        task = asyncio.current_task()
        assert task is not None
        # A real clock, because the loop's own may jump.
        timer = threading.Timer(
            ROUND_DEADLINE_S, asyncio.get_running_loop().call_soon_threadsafe, [limit.reschedule, 0]
        )
        timer.daemon = True
        timer.start()
        try:
            return [g async for g in rollout.run(PROMPTS, n=3, sampling=sampling, events=events, seed=seed)]
        finally:
            timer.cancel()


def undisturbed(model: Path, sampling: Sampling = SAMPLING, **settings: Any) -> list[Tokens]:
    """What undisturbed runs give, by seed."""

    async def scenario() -> list[Tokens]:
        async with a_rollout(model, **{"instances": 1} | settings) as rollout:
            return [
                tokens_of(await rolled_out(rollout, lambda event: None, seed, sampling)) for seed in range(NUM_SEEDS)
            ]

    return asyncio.run(scenario())


@pytest.fixture(scope="module")
def expected(model: Path) -> list[Tokens]:
    return undisturbed(model)


def a_plan(rollout: Rollout, rng: random.Random, kinds: list[str]) -> StrikesAt:
    """One or two strikes at chosen moments."""
    plan: dict[int, tuple[str, Callable[[], None]]] = {}
    for _ in range(rng.choice([1, 1, 2])):
        name = rng.choice(kinds)
        plan[rng.randrange(2, 40)] = (name, partial(STRIKES[name], rollout.fleet, rng))
    return StrikesAt(plan)


async def disturbed_rounds(rollout: Rollout, model: Path, expected: list[Tokens], tally: Tally, **options: Any) -> None:
    kinds, sampling = options.get("kinds", list(STRIKES)), options.get("sampling", SAMPLING)
    before = shared_files(os.getpid())  # of other tests in this process
    async with rollout:
        for _ in range(options["num_rounds"]):
            number = tally.rounds
            if number % 5 == 4:  # the same weights, of a new weights version: nothing of the old one may be used
                await rollout.update_weights(model)
            sink = a_plan(rollout, rng_of(tally.test, number), kinds)
            try:
                groups = await rolled_out(rollout, sink, number % NUM_SEEDS, sampling)
            except (SeerError, TimeoutError) as error:
                raise AssertionError(f"{tally.story(sink.done)}\n{stacks_of(rollout.fleet)}") from error
            tally.compare(tokens_of(groups), expected[number % NUM_SEEDS], sink.done)
            tally.check_ends(groups, rollout.weights_version, sink.done)
        tally.instances_lost += rollout.fleet.num_lost
        files = shared_files(os.getpid()) - before
        children = [instance.pid for instance in rollout.fleet.instances]
    tally.check_leftovers(files, children)
    tally.save()


def test_no_fault_loses_doubles_or_changes_a_token(model: Path, expected: list[Tokens], tmp_path: Path) -> None:
    tally = Tally("local")
    with proxied():
        while tally.rounds < LOCAL_ROUNDS:
            hosting = replace(HOSTING, log_dir=tmp_path / "logs")
            rollout = a_rollout(model, pool_ssd_dir=tmp_path, pool_ssd_bytes=8 << 20, hosting=hosting)
            num_rounds = min(ROUNDS_PER_FLEET, LOCAL_ROUNDS - tally.rounds)
            asyncio.run(disturbed_rounds(rollout, model, expected, tally, num_rounds=num_rounds))
    tally.finish()


@pytest.mark.filterwarnings("ignore")  # vLLM and what it imports warn of each other's deprecations
@pytest.mark.skipif(not VLLM_ROUNDS, reason="vLLM takes part from 25 rounds on")
def test_no_fault_changes_a_token_of_vllm(model: Path, tmp_path: Path) -> None:
    pytest.importorskip("vllm")
    greedy = Sampling(max_tokens=64, temperature=0.0, ignore_eos=True)
    engine: dict[str, Any] = {"engine": "vllm", "kv_blocks": 64, "chunk_tokens": 24, "hosting": VLLM_HOSTING}
    expected = undisturbed(model, greedy)
    tally = Tally("vllm")
    with proxied():
        rollout = a_rollout(model, **engine)
        options = {"kinds": ON_VLLM, "sampling": greedy, "num_rounds": VLLM_ROUNDS}
        asyncio.run(disturbed_rounds(rollout, model, expected, tally, **options))
    tally.finish()


def test_no_fault_of_mooncake_changes_a_token(model: Path, expected: list[Tokens]) -> None:
    tally = Tally("mooncake")

    def kill_master(name: str) -> None:
        now = supervise.find_state(name, "/dev/shm")
        send(signal.SIGKILL, now.pids.get("master") if now is not None else None)

    async def disturbed(name: str) -> None:
        async with a_rollout(model, pool="mooncake", pool_name=name) as rollout:
            for number in range(MOONCAKE_ROUNDS):
                moment = rng_of(tally.test, number).randrange(2, 40)
                sink = StrikesAt({moment: ("kill Mooncake's master", partial(kill_master, name))})
                groups = await rolled_out(rollout, sink, number % NUM_SEEDS, SAMPLING)
                tally.compare(tokens_of(groups), expected[number % NUM_SEEDS], sink.done)
                tally.check_ends(groups, rollout.weights_version, sink.done)

    with a_mooncake_store() as store:
        asyncio.run(disturbed(store.name))
    tally.finish()
