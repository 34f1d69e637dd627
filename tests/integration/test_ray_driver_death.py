# SPDX-License-Identifier: Apache-2.0
"""The program that drives a rollout on a Ray cluster is killed: its instances, agents and store end, and their shared
memory is freed, although nobody tells them to.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest

pytest.importorskip("torch")
pytest.importorskip("ray")

from pools import needs_mooncake
from processes import descendants
from ray_clusters import QUIET, two_nodes
from seer.engine.local.tiny import make_tiny_model

DEADLINE_S = 120.0
DRIVER = """
import asyncio, json, sys
from seer import HostingConfig, Rollout, Sampling

async def main(model, address):
    hosting = HostingConfig(pin_cores=False, ray=address)
    settings = {"instances": 2, "kv_blocks": 256, "pool": "mooncake", "pool_bytes": 64 << 20}
    async with Rollout(model, hosting=hosting, **settings) as rollout:
        run = rollout.run([[3, 7, 11]], n=8, sampling=Sampling(max_tokens=400, ignore_eos=True))
        fleet = rollout.fleet
        nodes = [task.result() for _, task in fleet._hosting._nodes._ready()]
        agents = [int(await node.agent.renew.remote()) for node in nodes]
        near = [node.way_into_pool["near"]["name"] for node in nodes]
        found = {"instances": [one.pid for one in fleet.instances], "agents": agents, "near": near}
        print(json.dumps(found), flush=True)
        async for _ in run:
            pass
        await asyncio.Event().wait()

asyncio.run(main(*sys.argv[1:]))
"""


def wait_until(what: Callable[[], object], why: str) -> None:
    last_s = time.monotonic() + DEADLINE_S
    while not what():
        assert time.monotonic() < last_s, why
        time.sleep(0.05)


@pytest.mark.timeout(400)
@pytest.mark.filterwarnings("ignore")  # Ray's own
def test_what_a_killed_driver_had_on_the_nodes_ends_and_frees_its_memory(tmp_path: Path) -> None:
    needs_mooncake()
    model = make_tiny_model(tmp_path / "tiny")
    with (
        two_nodes() as cluster,
        open(tmp_path / "stderr", "wb") as stderr,
        subprocess.Popen(
            [sys.executable, "-c", DRIVER, str(model), cluster.address],
            stdout=subprocess.PIPE,
            stderr=stderr,
            env={**os.environ, **QUIET},
        ) as driver,
    ):
        assert driver.stdout is not None
        line = driver.stdout.readline()
        assert line, (tmp_path / "stderr").read_text()[-3000:]
        found = json.loads(line)
        arenas = [path for name in found["near"] for path in Path("/dev/shm").glob(f"*/pool-{name}.arena")]
        assert len(arenas) == len(found["instances"]) == len(found["agents"]) == 2
        pids = [*found["instances"], *found["agents"], *descendants(driver.pid)]
        pids += [child for pid in found["agents"] for child in descendants(pid)]
        driver.kill()
        driver.wait()
        wait_until(lambda: not [pid for pid in pids if Path(f"/proc/{pid}").exists()], "a process outlived the driver")
        wait_until(lambda: not [path for path in arenas if path.exists()], "a near tier outlived the driver")
