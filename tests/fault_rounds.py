# SPDX-License-Identifier: Apache-2.0
"""Rounds of the fault campaign on one fleet: a rollout each, struck once or twice, compared with an undisturbed one."""

from __future__ import annotations

import asyncio
import os
import random
import threading
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from typing import Any

from commands import shared_files
from fault_campaign import StrikesAt, Tally, Tokens, rng_of, tokens_of
from seer import GroupResult, HostingConfig, Rollout, Sampling
from seer.errors import SeerError
from seer.metrics.events import Event
from strikes import STRIKES, Strike, stacks_of

ROUNDS_PER_FLEET = 25
"""Then the fleet is closed, which must leave nothing, and a new one is started: a pool that was removed stays away."""
ROUND_DEADLINE_S = 200.0
NUM_SEEDS = 3
PROMPTS = [[3 + i, 7, 11] for i in range(5)]
SAMPLING = Sampling(max_tokens=64)
HOSTING = HostingConfig(
    pin_cores=False,
    start_deadline_s=60.0,
    call_deadline_s=200.0,
    heartbeat_s=0.2,
    silence_deadline_s=2.0,
    progress_deadline_s=20.0,
    max_restarts=10**6,
    restart_pause_s=0.0,
)


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


def a_plan(rollout: Rollout, rng: random.Random, strikes: Mapping[str, Strike]) -> StrikesAt:
    """One or two strikes at chosen moments."""
    plan: dict[int, tuple[str, Callable[[], None]]] = {}
    for _ in range(rng.choice([1, 1, 2])):
        name = rng.choice(list(strikes))
        plan[rng.randrange(2, 40)] = (name, partial(strikes[name], rollout.fleet, rng))
    return StrikesAt(plan)


async def disturbed_rounds(rollout: Rollout, model: Path, expected: list[Tokens], tally: Tally, **options: Any) -> None:
    """Rounds on one fleet, which leaves nothing when it is closed."""
    tally.check_leftovers(await struck_rounds(rollout, model, expected, tally, **options))
    tally.save()


async def struck_rounds(
    rollout: Rollout, model: Path, expected: list[Tokens], tally: Tally, **options: Any
) -> set[Path]:
    """Rounds on one fleet, which is closed then; returns the files in shared memory that it had."""
    strikes, sampling = options.get("strikes", STRIKES), options.get("sampling", SAMPLING)
    before = shared_files(os.getpid())  # of other tests in this process
    async with rollout:
        for number in range(tally.rounds, tally.rounds + options["num_rounds"]):
            if not tally.goes_on(number + 1):
                break
            sink = a_plan(rollout, rng_of(tally.test, number), strikes)
            try:
                if number % 5 == 4:  # the same weights, of a new weights version: nothing of the old one may be used
                    await rollout.fleet.wait_until_up()  # one that is alone and has no memory refuses them
                    await rollout.update_weights(model)
                groups = await rolled_out(rollout, sink, number % NUM_SEEDS, sampling)
            except (SeerError, TimeoutError) as error:
                raise AssertionError(f"{tally.story(sink.done)}\n{stacks_of(rollout.fleet)}") from error
            tally.compare(tokens_of(groups), expected[number % NUM_SEEDS], sink.done)
            tally.check_ends(groups, rollout.weights_version, sink.done)
        tally.instances_lost += rollout.fleet.num_lost
        return shared_files(os.getpid()) - before
