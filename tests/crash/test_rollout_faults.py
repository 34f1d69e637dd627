# SPDX-License-Identifier: Apache-2.0
"""Rollouts on instances that are killed, stopped, slowed down and disturbed at random (tests/strikes.py).

Every token is there once, nothing hangs, and nothing is left when the fleet is closed.
"""

from __future__ import annotations

import asyncio
import random
import signal
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("torch")

from fault_campaign import Tally, Tokens, num_rounds_of
from fault_rounds import HOSTING, ROUNDS_PER_FLEET, a_rollout, disturbed_rounds, struck_rounds, undisturbed
from frame_proxy import proxied
from pools import a_mooncake_store
from seer import Sampling
from seer.engine.local.tiny import make_tiny_model
from seer.hosting.fleet import HostedFleet
from seer.kvpool import supervise
from strikes import STRIKES, Strike, later, send
from vllm_engines import HEAD_DIM

VLLM_ROUNDS, MOONCAKE_ROUNDS, LOCAL_ROUNDS = map(num_rounds_of, ("vllm", "mooncake", "local"))
VLLM_HOSTING = replace(HOSTING, start_deadline_s=200.0, heartbeat_s=0.5, silence_deadline_s=10.0)
ON_VLLM = {
    name: strike
    for name, strike in STRIKES.items()
    if name not in ("kill all instances", "take memory from an instance")
}


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_tiny_model(tmp_path_factory.mktemp("model") / "tiny", head_dim=HEAD_DIM)


@pytest.fixture(scope="module")
def expected(model: Path) -> list[Tokens]:
    return undisturbed(model)


def test_no_fault_loses_doubles_or_changes_a_token(model: Path, expected: list[Tokens], tmp_path: Path) -> None:
    tally = Tally("local")
    with proxied():
        while tally.goes_on(LOCAL_ROUNDS):
            hosting = replace(HOSTING, log_dir=tmp_path / "logs")
            rollout = a_rollout(model, pool_ssd_dir=tmp_path, pool_ssd_bytes=8 << 20, hosting=hosting)
            num_rounds = min(ROUNDS_PER_FLEET, LOCAL_ROUNDS - tally.rounds)
            asyncio.run(disturbed_rounds(rollout, model, expected, tally, num_rounds=num_rounds))
    tally.finish()


@pytest.mark.filterwarnings("ignore")  # vLLM and what it imports warn of each other's deprecations
@pytest.mark.skipif(not VLLM_ROUNDS, reason="vLLM has no share of so few rounds")
def test_no_fault_changes_a_token_of_vllm(model: Path, tmp_path: Path) -> None:
    pytest.importorskip("vllm")
    greedy = Sampling(max_tokens=64, temperature=0.0, ignore_eos=True)
    engine: dict[str, Any] = {"engine": "vllm", "kv_blocks": 64, "chunk_tokens": 24, "hosting": VLLM_HOSTING}
    expected = undisturbed(model, greedy)
    tally = Tally("vllm")
    with proxied():
        rollout = a_rollout(model, **engine)
        options = {"strikes": ON_VLLM, "sampling": greedy, "num_rounds": VLLM_ROUNDS}
        asyncio.run(disturbed_rounds(rollout, model, expected, tally, **options))
    tally.finish()


def on_mooncake(name: str) -> dict[str, Strike]:
    """Faults of the store's processes, and of what uses them."""

    def server(which: str) -> int | None:
        state = supervise.find_state(name, "/dev/shm")
        return state.pids.get(which) if state is not None else None

    def kill(which: str, fleet: HostedFleet, rng: random.Random) -> None:
        send(signal.SIGKILL, server(which))

    def stop_and_resume(which: str, fleet: HostedFleet, rng: random.Random) -> None:
        pid = server(which)
        send(signal.SIGSTOP, pid)
        later(rng.uniform(0.1, 1.0), lambda: send(signal.SIGCONT, pid))

    return {
        "kill Mooncake's master": partial(kill, "master"),
        "kill Mooncake's owner": partial(kill, "owner"),
        "stop and resume Mooncake's master": partial(stop_and_resume, "master"),
        "stop and resume Mooncake's owner": partial(stop_and_resume, "owner"),
    } | {name: STRIKES[name] for name in ("kill an instance", "stop and resume an instance", "slow an instance down")}


def test_no_fault_of_mooncake_changes_a_token(model: Path, expected: list[Tokens]) -> None:
    tally = Tally("mooncake")
    while tally.goes_on(MOONCAKE_ROUNDS):
        with a_mooncake_store() as store:
            rollout = a_rollout(model, pool="mooncake", pool_name=store.name)
            options = {"strikes": on_mooncake(store.name)}
            num_rounds = min(ROUNDS_PER_FLEET, MOONCAKE_ROUNDS - tally.rounds)
            files = asyncio.run(struck_rounds(rollout, model, expected, tally, num_rounds=num_rounds, **options))
        tally.check_leftovers(files)
        tally.save()
    tally.finish()
