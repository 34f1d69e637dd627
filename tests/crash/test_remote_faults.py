# SPDX-License-Identifier: Apache-2.0
"""Rollouts on instances that dial in over TCP, as on a Ray cluster, while their processes and connections are struck.

Most rounds need no cluster (tests/dial_hosting.py); on Ray itself, instances, their actors and a whole node are killed.
"""

from __future__ import annotations

import asyncio
import os
import random
import signal
from dataclasses import replace
from pathlib import Path

import pytest

pytest.importorskip("torch")

from dial_hosting import over_tcp
from fault_campaign import Tally, Tokens, num_rounds_of
from fault_rounds import HOSTING, ROUNDS_PER_FLEET, a_rollout, disturbed_rounds, struck_rounds, undisturbed
from link_strikes import LINK_STRIKES
from ray_clusters import TwoNodes, two_nodes
from seer.engine.local.tiny import make_tiny_model
from seer.hosting.fleet import HostedFleet
from strikes import Strike, kill_an_instance, slow_an_instance_down, stop_an_instance, stop_and_resume_an_instance

TCP_ROUNDS, RAY_ROUNDS = map(num_rounds_of, ("tcp", "ray"))


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_tiny_model(tmp_path_factory.mktemp("model") / "tiny")


@pytest.fixture(scope="module")
def expected(model: Path) -> list[Tokens]:
    return undisturbed(model)


def test_no_fault_of_a_connection_changes_a_token(model: Path, expected: list[Tokens]) -> None:
    tally = Tally("tcp")
    with over_tcp():
        while tally.goes_on(TCP_ROUNDS):
            options = {"strikes": LINK_STRIKES, "num_rounds": min(ROUNDS_PER_FLEET, TCP_ROUNDS - tally.rounds)}
            asyncio.run(disturbed_rounds(a_rollout(model), model, expected, tally, **options))
    tally.finish()


def kill_an_actor(fleet: HostedFleet, rng: random.Random) -> None:
    """The parent of an instance's process, which must not outlive it."""
    pid = rng.choice(fleet.instances).pid
    if pid is not None and Path(f"/proc/{pid}").exists():
        parent = int(Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[1])
        if parent not in (1, os.getpid()):
            os.kill(parent, signal.SIGKILL)


def on_ray(cluster: TwoNodes) -> dict[str, Strike]:
    return {
        "kill an instance": kill_an_instance,
        "stop an instance": stop_an_instance,
        "stop and resume an instance": stop_and_resume_an_instance,
        "slow an instance down": slow_an_instance_down,
        "kill an actor": kill_an_actor,
        "lose a node": lambda fleet, rng: cluster.replace_second(),
    }


@pytest.mark.filterwarnings("ignore")  # Ray's own
@pytest.mark.skipif(not RAY_ROUNDS, reason="Ray has no share of so few rounds")
def test_no_fault_on_a_cluster_changes_a_token(model: Path, expected: list[Tokens], tmp_path: Path) -> None:
    tally = Tally("ray")
    files: set[Path] = set()
    with two_nodes() as cluster:
        hosting = replace(HOSTING, ray=cluster.address, log_dir=tmp_path, silence_deadline_s=8.0)
        while tally.goes_on(RAY_ROUNDS):
            rollout = a_rollout(model, hosting=hosting)
            options = {"strikes": on_ray(cluster), "num_rounds": min(ROUNDS_PER_FLEET, RAY_ROUNDS - tally.rounds)}
            files |= asyncio.run(struck_rounds(rollout, model, expected, tally, **options))
            tally.save()
    tally.check_leftovers(files)  # now, because the cluster's own processes are among ours
    tally.finish()
