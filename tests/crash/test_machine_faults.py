# SPDX-License-Identifier: Apache-2.0
"""Faults at random over a fleet on two machines: nodes, links and processes that are lost and come back, instances that
join and leave. Every response comes once, with the tokens of one machine, and nothing is left.

SEER_FAULT_ROUNDS, SEER_FAULT_SEED and SEER_FAULT_SECONDS: fault_campaign.py. A round here takes as long as many
elsewhere, so there is one for every ten of them, and at least as many as show every kind of fault once.
"""

from __future__ import annotations

import subprocess
import sys
import time
from pathlib import Path

import pytest

from fault_campaign import ROUNDS, SEED
from pools import needs_mooncake
from two_machines import PORT, Machine, ray_environment, two_machines, why_not

pytest.importorskip("torch")
pytest.importorskip("ray")

NUM_ROUNDS = max(4, ROUNDS // 10)
DRIVER = Path(__file__).parent.parent / "machine_faults_driver.py"
MARKS = ("seer.", "mooncake", "ray::NodeAgent", "machine_faults_driver")


def left_on(machine: Machine) -> list[str]:
    """Processes and shared memory of Seer."""
    commands = [command for command in machine.processes().values() if any(mark in command for mark in MARKS)]
    return commands + machine.shared_memory()


@pytest.mark.slow
@pytest.mark.timeout(200 + 120 * NUM_ROUNDS)
@pytest.mark.skipif(why_not() is not None, reason=str(why_not()))
def test_no_fault_of_a_machine_loses_doubles_or_changes_a_token(tmp_path: Path) -> None:
    from seer.engine.local.tiny import make_tiny_model

    needs_mooncake()
    model = make_tiny_model(tmp_path / "tiny")
    with two_machines(num_cpus=(2, 2)) as (one, two):
        words = [str(DRIVER), str(model), f"{one.address}:{PORT}", str(two.pid), str(two.folder), str(NUM_ROUNDS)]
        done = subprocess.run(
            one.command(sys.executable, *words),
            capture_output=True,
            text=True,
            check=False,
            timeout=180 + 120 * NUM_ROUNDS,
            env=ray_environment() | {"SEER_FAULT_SEED": str(SEED)},
        )
        print(done.stdout)
        assert done.returncode == 0, f"SEER_FAULT_SEED={SEED}\n{done.stdout[-3000:]}{done.stderr[-6000:]}"
        last_s = time.monotonic() + 60.0
        while (left := left_on(one) + left_on(two)) and time.monotonic() < last_s:
            time.sleep(0.2)
        assert not left, f"SEER_FAULT_SEED={SEED} left {left}"
