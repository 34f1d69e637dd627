# SPDX-License-Identifier: Apache-2.0
"""Rounds of random faults over two machines; run on the first of them by test_machine_faults.py.

    python machine_faults_driver.py MODEL RAY_ADDRESS FAR_PID FAR_FOLDER ROUNDS

FAR_PID is a process that keeps the namespaces of the other machine, FAR_FOLDER is for Ray's files there. Kinds of
faults are dealt as cards are: each one comes before any comes again. A rollout takes less time than a fault, so half of
its responses wait after a turn until the faults are over; then they go on with what is left of the fleet, or was added.
The last line is the tally, as JSON.
"""

from __future__ import annotations

import asyncio
import random
import sys
import time
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

from fault_campaign import StrikesAt, Tally, rng_of, tokens_of
from machine_strikes import NUM_INSTANCES, Machines
from seer import Conversation, End, FinishReason, GroupResult, HostingConfig, Reply, Rollout, Sampling
from seer.hosting.ray import placement
from seer.metrics.events import EventSink, discard
from two_machines_driver import MovingIsFree

PROMPTS = [[3 + i, 7, 11, 5 + i, 9] for i in range(5)]
SAMPLING = Sampling(max_tokens=64, stop_token_ids=(16, 48, 80, 112))
HOSTING = HostingConfig(
    pin_cores=False,
    heartbeat_s=0.2,
    silence_deadline_s=4.0,
    lease_deadline_s=10.0,
    start_deadline_s=180.0,
    max_restarts=1000,
)
ROUND_DEADLINE_S = 150.0
NUM_SEEDS = 3
STRIKES = 2
"""In a round, so that faults meet."""
FIRST, LAST = 2, 40
"""Chunks that have started or stopped when a round is struck."""


def a_rollout(model: str, ray: str | None) -> Rollout:
    return Rollout(
        model,
        instances=1 if ray is None else NUM_INSTANCES,
        kv_blocks=512,
        max_num_seqs=8,
        chunk_tokens=16,
        pool="none" if ray is None else "mooncake",
        pool_bytes=64 << 20,
        hosting=replace(HOSTING, ray=ray),
    )


class Turns:
    """An environment that gives a token after each turn; every other response waits first after its first one."""

    def __init__(self, over: Callable[[], Awaitable[object]]) -> None:
        self._over = over
        self.num_waited = 0

    async def __call__(self, conversation: Conversation) -> Reply | End:
        if conversation.finish_reason is FinishReason.LENGTH:
            return End()
        if conversation.turn == 1 and conversation.index % 2:
            self.num_waited += 1
            await self._over()
        return Reply(token_ids=[7])


class Deck:
    """Kinds of strikes."""

    def __init__(self, rng: random.Random, kinds: Sequence[str]) -> None:
        self._rng, self._kinds = rng, list(kinds)
        self._left: list[str] = []

    def deal(self) -> str:
        if not self._left:
            self._left = self._rng.sample(self._kinds, len(self._kinds))
        return self._left.pop()


async def a_round(rollout: Rollout, turns: Turns, seed: int, events: EventSink = discard) -> list[GroupResult]:
    run = rollout.run(
        PROMPTS,
        n=4,
        sampling=SAMPLING,
        seed=seed,
        events=events,
        environment=turns,
        environment_deadline_s=ROUND_DEADLINE_S,
    )
    return [group async for group in run]


async def rounds(rollout: Rollout, machines: Machines, expected: list[Any], tally: Tally, num: int) -> None:
    deck = Deck(rng_of(tally.test, -1), sorted(machines.strikes(random.Random())))
    async with rollout:
        assert rollout.fleet.pool is not None
        rollout.fleet.pool.transfer = MovingIsFree()
        while tally.goes_on(num):
            began_s, seed, rng = time.monotonic(), tally.rounds % NUM_SEEDS, rng_of(tally.test, tally.rounds)
            kinds = machines.strikes(rng)
            names = [deck.deal() for _ in range(STRIKES)]
            moments = rng.sample(range(FIRST, LAST), STRIKES)
            sink = StrikesAt({moment: (name, kinds[name]) for moment, name in zip(moments, names, strict=True)})
            async with asyncio.timeout(ROUND_DEADLINE_S):
                turns = Turns(partial(machines.over, sink.done, STRIKES))
                groups = await a_round(rollout, turns, seed, sink)
            assert turns.num_waited, "nothing was left when the faults were over"
            tally.check_ends(groups, 0, sink.done)
            tally.compare(tokens_of(groups), expected[seed], sink.done)
            ended_s = time.monotonic()
            async with asyncio.timeout(ROUND_DEADLINE_S):
                await machines.settle()
            print(f"{ended_s - began_s:.1f} s, settled in {time.monotonic() - ended_s:.1f} s", flush=True)
        tally.instances_lost = rollout.fleet.num_lost


async def main() -> None:
    model, ray, far_pid, far_folder, num = sys.argv[1:]
    placement.SUSPECT_S = 15.0  # so that the node is used again before the rounds are over
    async with a_rollout(model, None) as alone:
        at_once = Turns(partial(asyncio.sleep, 0))
        expected = [tokens_of(await a_round(alone, at_once, seed)) for seed in range(NUM_SEEDS)]
    tally, rollout = Tally("machines"), a_rollout(model, ray)
    await rounds(rollout, Machines(rollout, int(far_pid), Path(far_folder)), expected, tally, int(num))
    tally.finish()


if __name__ == "__main__":
    sys.path.insert(0, str(Path(__file__).parent))
    asyncio.run(main())
