# SPDX-License-Identifier: Apache-2.0
"""Rollouts while somebody kills, stops and damages things at random: every token is there once, nothing hangs.

Struck are the instances, the draft server, the pool (its memory damaged or removed; Mooncake's master killed) and
the driver itself, whose run is then resumed. Rounds are few by default; SEER_FAULT_ROUNDS=200 is the long form
(`make test-faults`), which also says what was done.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import random
import signal
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from faults import children_of, damage
from pools import a_mooncake_store

pytest.importorskip("torch")

from seer import FinishReason, GroupResult, HostingConfig, Rollout, Sampling
from seer.engine.local.tiny import make_tiny_model
from seer.hosting.fleet_pool import PREFIX
from seer.kvpool import supervise
from seer.kvpool.local_files import PoolFiles, find_pools, remove_files
from seer.metrics.events import Event, Started, Stopped

ROUNDS = int(os.environ.get("SEER_FAULT_ROUNDS", "6"))
DRIVER_ROUNDS = MOONCAKE_ROUNDS = max(1, ROUNDS // 10)
ROUND_DEADLINE_S = 120.0
NUM_SEEDS = 3
PROMPTS = [[3 + i, 7, 11] for i in range(5)]
SAMPLING = Sampling(max_tokens=64)
DRIVER_TOKENS = 256
HOSTING = HostingConfig(
    pin_cores=False, heartbeat_s=0.2, silence_deadline_s=2.0, progress_deadline_s=20.0, max_restarts=10 * ROUNDS
)
Tokens = dict[tuple[int, int], list[int]]


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_tiny_model(tmp_path_factory.mktemp("model") / "tiny")


@pytest.fixture(scope="module")
def expected(model: Path) -> list[Tokens]:
    """What undisturbed runs give, by seed."""

    async def scenario() -> list[Tokens]:
        async with a_rollout(model, instances=1) as rollout:
            return [tokens_of(await rolled_out(rollout, lambda event: None, seed)) for seed in range(NUM_SEEDS)]

    return asyncio.run(scenario())


def tokens_of(groups: list[GroupResult]) -> Tokens:
    return {(r.group, r.index): r.token_ids for group in groups for r in group.responses}


def a_rollout(model: Path, **settings: Any) -> Rollout:
    defaults: dict[str, Any] = {"instances": 2, "kv_blocks": 256, "max_num_seqs": 6, "chunk_tokens": 16}
    return Rollout(model, **defaults | {"pool_bytes": 8 << 20, "hosting": HOSTING} | settings)


async def rolled_out(rollout: Rollout, events: Callable[[Event], None], seed: int) -> list[GroupResult]:
    async with asyncio.timeout(ROUND_DEADLINE_S):
        return [g async for g in rollout.run(PROMPTS, n=3, sampling=SAMPLING, events=events, seed=seed)]


def send(number: signal.Signals, *pids: int | None) -> None:
    for pid in pids:
        if pid is not None:
            with contextlib.suppress(ProcessLookupError):  # an earlier strike may have ended it unnoticed so far
                os.kill(pid, number)


def strike(rollout: Rollout, rng: random.Random) -> str:
    """Do one thing that no program should have to bear."""
    fleet = rollout.fleet
    assert fleet.pool is not None
    pids = [instance.pid for instance in fleet.instances]
    server = fleet.draft_servers.processes[0] if fleet.draft_servers else None
    kinds: dict[str, Callable[[], None]] = {
        "kill an instance": lambda: send(signal.SIGKILL, rng.choice(pids)),
        "kill all instances": lambda: send(signal.SIGKILL, *pids),
        "stop an instance": lambda: send(signal.SIGSTOP, rng.choice(pids)),
        "kill the draft server": lambda: send(signal.SIGKILL, server.pid if server else None),
        "damage the pool": lambda: damage(fleet.pool) if fleet.pool is not None else None,
        "remove the pool": lambda: (
            remove_files(PoolFiles.named(fleet.pool.settings["name"], "/dev/shm")) if fleet.pool is not None else None
        ),
    }
    kind = rng.choice(list(kinds))
    kinds[kind]()
    return kind


class StrikesAt:
    """An event sink that strikes when so many chunks have started or stopped."""

    def __init__(self, moments: set[int], action: Callable[[], str]) -> None:
        self._moments, self._action = moments, action
        self._num_seen = 0
        self.done: list[str] = []

    def __call__(self, event: Event) -> None:
        if isinstance(event, Started | Stopped):
            self._num_seen += 1
            if self._num_seen in self._moments:
                self.done.append(self._action())


def check(groups: list[GroupResult], expected: Tokens, weights_version: int, story: str) -> None:
    assert tokens_of(groups) == expected, story
    responses = [r for group in groups for r in group.responses]
    assert len(responses) == 3 * len(PROMPTS), story
    assert {r.finish_reason for r in responses} <= {FinishReason.STOP, FinishReason.LENGTH}, story
    assert {r.weights_version for r in responses} == {weights_version}, story


def test_no_fault_loses_doubles_or_changes_a_token(model: Path, expected: list[Tokens]) -> None:
    rng = random.Random(ROUNDS)
    strikes: Counter[str] = Counter()

    async def disturbed() -> None:
        async with a_rollout(model) as rollout:
            for number in range(ROUNDS - DRIVER_ROUNDS - MOONCAKE_ROUNDS):
                if number % 5 == 4:  # the same weights, of a new weights version: nothing of the old one may be used
                    await rollout.update_weights(model)
                moments = {rng.randrange(2, 40) for _ in range(rng.choice([1, 1, 2]))}
                sink = StrikesAt(moments, lambda: strike(rollout, rng))
                groups = await rolled_out(rollout, sink, number % NUM_SEEDS)
                check(
                    groups, expected[number % NUM_SEEDS], rollout.weights_version, f"round {number}, after {sink.done}"
                )
                strikes.update(sink.done)
            servers = rollout.fleet.draft_servers
            restarts = sum(one.num_restarts for one in servers.processes) if servers is not None else 0
            print(
                f"struck {dict(strikes)}; {rollout.fleet.num_lost} instances lost, {restarts} draft servers restarted"
            )

    asyncio.run(disturbed())
    assert strikes


def test_no_fault_of_mooncake_changes_a_token(model: Path, expected: list[Tokens]) -> None:
    rng = random.Random(ROUNDS + 1)
    strikes: Counter[str] = Counter()

    def kill_master(name: str) -> str:
        now = supervise.find_state(name, "/dev/shm")
        send(signal.SIGKILL, now.pids.get("master") if now is not None else None)
        return "kill Mooncake's master"

    async def disturbed(name: str) -> None:
        async with a_rollout(model, pool="mooncake", pool_name=name) as rollout:
            for number in range(MOONCAKE_ROUNDS):
                sink = StrikesAt({rng.randrange(2, 40)}, partial(kill_master, name))
                groups = await rolled_out(rollout, sink, number % NUM_SEEDS)
                check(
                    groups, expected[number % NUM_SEEDS], rollout.weights_version, f"round {number}, after {sink.done}"
                )
                strikes.update(sink.done)

    with a_mooncake_store() as store:
        asyncio.run(disturbed(store.name))
    print(f"struck {dict(strikes)}")
    assert strikes


def a_driver(model: Path, prompts: Path, run_dir: Path, *, resume: bool) -> subprocess.Popen[str]:
    words = ["rollout", "--model", str(model), "--prompts", str(prompts), "--n", "3", "--run-dir", str(run_dir)]
    words += ["--max-tokens", str(DRIVER_TOKENS), "--instances", "2", "--no-pin", "--chunk-tokens", "16"]
    words += ["--kv-memory", "8MiB", "--pool-memory", "8MiB"]
    if resume:
        words = ["rollout", "--resume", str(run_dir)]
    return subprocess.Popen(
        [sys.executable, "-m", "seer.cli.main", *words, "--quiet", "--json"],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env=dict(os.environ) | {"PYTHONPATH": os.pathsep.join(sys.path)},
    )


def kill_at_chunk(driver: subprocess.Popen[str], journal: Path, num_chunks: int) -> bool:
    """Kill the driver once its journal is so long; False if it was done before."""
    deadline = time.monotonic() + ROUND_DEADLINE_S
    while not (journal.exists() and journal.read_bytes().count(b"\n") > num_chunks):
        assert time.monotonic() < deadline, "the run writes no journal"
        if driver.poll() is not None:
            break
        time.sleep(0.002)
    driver.kill()
    _, printed = driver.communicate(timeout=ROUND_DEADLINE_S)
    assert driver.returncode in (0, -signal.SIGKILL), printed
    return driver.returncode != 0


def results(run_dir: Path) -> dict[tuple[str, int], list[int]]:
    records = [json.loads(line) for line in (run_dir / "results.jsonl").read_text().splitlines()]
    tokens = {(r["prompt_id"], r["index"]): r["token_ids"] for r in records}
    assert len(tokens) == len(records), "a response was written twice"
    return tokens


def wait_for_no_orphan(run_dir: Path) -> None:
    deadline = time.monotonic() + ROUND_DEADLINE_S
    while children_of(run_dir):  # they follow their driver at once; nobody sends them anything
        assert time.monotonic() < deadline, f"orphans: {children_of(run_dir)}"
        time.sleep(0.02)


def test_a_killed_driver_loses_no_token_and_leaves_nothing_behind(model: Path, tmp_path: Path) -> None:
    rng = random.Random(ROUNDS + 2)
    prompts = tmp_path / "prompts.jsonl"
    prompts.write_text("\n".join(json.dumps({"prompt_token_ids": ids}) for ids in PROMPTS) + "\n")
    whole = a_driver(model, prompts, tmp_path / "whole", resume=False)
    _, printed = whole.communicate(timeout=ROUND_DEADLINE_S)
    assert whole.returncode == 0, printed
    num_kills = 0
    for number in range(DRIVER_ROUNDS):
        run_dir = tmp_path / f"run-{number}"
        driver = a_driver(model, prompts, run_dir, resume=False)
        num_kills += kill_at_chunk(driver, run_dir / "journal.jsonl", rng.randrange(1, 100))
        wait_for_no_orphan(run_dir)
        again = a_driver(model, prompts, run_dir, resume=True)
        _, printed = again.communicate(timeout=ROUND_DEADLINE_S)
        assert again.returncode == 0, f"round {number}: {printed}"
        assert results(run_dir) == results(tmp_path / "whole"), f"round {number}"
    dead = [pool.name for pool in find_pools() if pool.name.startswith(f"{PREFIX}-") and not pool.live_pids]
    assert dead == [], "the resumed run gives back what the killed one left in shared memory"
    print(f"killed {num_kills} drivers in {DRIVER_ROUNDS} rounds")
    assert num_kills
