# SPDX-License-Identifier: Apache-2.0
"""A rollout over two machines, each in network and mount namespaces of its own: KV moves through a machine's shared
memory and over Mooncake's TCP, new weights are streamed to the other machine, a process is stopped, and the
cable is cut.
"""

from __future__ import annotations

import json
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest

from pools import needs_mooncake
from two_machines import PORT, Machine, ray_environment, two_machines, why_not

pytest.importorskip("torch")
pytest.importorskip("ray")

DEADLINE_S = 280.0
DRIVER = Path(__file__).parent.parent / "two_machines_driver.py"


def drive(model: Path, one: Machine, out: Path) -> dict[str, Any]:
    """Run the driver on the first machine; what it saw."""
    done = subprocess.run(
        one.command(sys.executable, str(DRIVER), str(model), f"{one.address}:{PORT}", str(out)),
        capture_output=True,
        text=True,
        check=False,
        timeout=DEADLINE_S,
        env=ray_environment(),
    )
    print(done.stdout)  # among it the share of moves that stayed inside a machine
    assert done.returncode == 0, done.stdout + done.stderr[-5000:]
    seen: dict[str, Any] = json.loads(out.read_text())
    return seen


def ours(machine: Machine) -> list[str]:
    """Processes of Seer on a machine, Ray's own left out."""
    marks = ("seer.", "mooncake", "ray::InstanceHost", "ray::NodeAgent", "two_machines_driver")
    return [command for command in machine.processes().values() if any(mark in command for mark in marks)]


@pytest.mark.slow
@pytest.mark.timeout(400)
@pytest.mark.skipif(why_not() is not None, reason=str(why_not()))
def test_a_rollout_over_two_machines_gives_the_tokens_of_one_through_every_fault(tmp_path: Path) -> None:
    from seer.engine.local.tiny import make_tiny_model

    needs_mooncake()
    model = make_tiny_model(tmp_path / "tiny")
    with two_machines() as (one, two):
        seen = drive(model, one, tmp_path / "out.json")
        for step in ("plain", "process stopped"):
            assert seen[step] == seen["expected"], step
        for step in ("new weights", "link cut"):
            assert seen[step] == seen["expected of new weights"], step
        assert seen["expected"] != seen["expected of new weights"]
        assert sorted(seen["nodes"]) == [one.address, one.address, two.address]
        assert seen["migrated_tokens"] > 0, "no KV moved"
        assert 0 < seen["node_changes"] < seen["migrations"], "moves inside a node, and between them"
        assert 0 < seen["far_loaded_bytes"] < seen["loaded_bytes"], "near moves do not come from the store"
        assert seen["versions"] == [1, 1, 1]
        # The KV of the machine that was cut off is computed again: once, and counted.
        assert seen["lost requests"], "no request was on the machine that was cut off"
        prompt = 5
        for num_generated, num_recomputed in seen["lost requests"]:
            assert num_recomputed <= prompt + num_generated, "computed again more than once"
        assert sum(num_recomputed for _, num_recomputed in seen["lost requests"]) > 0
        in_events, in_summary = seen["recomputed"]
        assert in_events == in_summary
        assert seen["lost"] >= 2, "more on a machine that is busy"
        assert {path.name for path in (tmp_path / "logs").iterdir()} == {f"instance-{i}.log" for i in range(3)}
        assert (ours(one), one.shared_memory()) == ([], []), "something was left beside the driver"
        # The other machine cannot be reached: leases end what is there, and free its memory. Ray's actors go later.
        last_s = time.monotonic() + 60.0
        while time.monotonic() < last_s and (two.shared_memory() or _seer(two)):
            time.sleep(0.2)
        assert (_seer(two), two.shared_memory()) == ([], []), "something was left on the machine that was cut off"


def _seer(machine: Machine) -> list[str]:
    return [command for command in ours(machine) if "ray::InstanceHost" not in command]
