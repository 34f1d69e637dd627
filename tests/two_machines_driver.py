# SPDX-License-Identifier: Apache-2.0
"""A driver that rolls out over two machines and strikes at them; run on the first by test_two_machines.py.

    python two_machines_driver.py MODEL RAY_ADDRESS OUT.json

Prints a line per step. OUT.json gets the tokens of every step and what was seen of the fleet.
"""

from __future__ import annotations

import asyncio
import json
import os
import signal
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

from seer import HostingConfig, Rollout, Sampling
from seer.engine.local.tiny import tiny_config, tiny_weights
from seer.metrics.events import Event, EventSink, Prefilling, Stopped, discard
from seer.metrics.summary import Summary
from seer.transfer import MoveCost, TransferCosts, TransferEstimate

PROMPTS = [[3 + i, 7, 11, 5 + i, 9] for i in range(6)]
HOSTING = {"pin_cores": False, "heartbeat_s": 0.2, "silence_deadline_s": 5.0, "lease_deadline_s": 10.0}
DEADLINE_S = 90.0


class MovingIsFree(TransferEstimate):
    """Always move: computing the tiny model's KV again is in truth as fast as moving it."""

    def __init__(self) -> None:
        super().__init__(TransferCosts(move=MoveCost(latency_s=0.0, bandwidth_bytes_s=1e15)))

    def saw_move(self, num_bytes: int, seconds: float) -> None:
        """Stay free."""

    def saw_prefill(self, num_tokens: int, seconds: float) -> None:
        """Stay free."""


def a_rollout(model: str, ray: str | None, out: Path) -> Rollout:
    where: dict[str, Any] = {} if ray is None else {"ray": ray, "log_dir": out.parent / "logs"}
    return Rollout(
        model,
        instances=2 if ray is None else 3,
        kv_blocks=512,
        max_num_seqs=8,
        chunk_tokens=16,
        pool="local" if ray is None else "mooncake",
        pool_bytes=64 << 20,
        hosting=HostingConfig(**HOSTING, **where),  # type: ignore[arg-type]
    )


class Once:
    """An event sink that strikes when the first chunks have ended, and notes what was lost and computed again."""

    def __init__(self, strike: Callable[[], None]) -> None:
        self._strike: Callable[[], None] | None = strike
        self.lost_tokens: dict[int, int] = {}
        """By request that was on a lost instance: what it had generated."""
        self.recomputed: Counter[int] = Counter()
        """By request."""

    def __call__(self, event: Event) -> None:
        if isinstance(event, Stopped) and event.reason == "lost":
            self.lost_tokens[event.request] = event.num_generated
        elif isinstance(event, Prefilling):
            self.recomputed[event.request] += event.num_recomputed
        if isinstance(event, Stopped) and event.num_generated >= 32 and self._strike is not None:
            strike, self._strike = self._strike, None
            strike()


async def tokens_of(rollout: Rollout, events: EventSink = discard) -> dict[str, list[int]]:
    found: dict[str, list[int]] = {}
    async for group in rollout.run(PROMPTS, n=4, sampling=Sampling(max_tokens=80), seed=3, events=events):
        for response in group.responses:
            name = f"{response.group}.{response.index}"
            assert name not in found, f"{name} came twice"
            found[name] = response.token_ids
    return found


async def expected(model: str, out: Path) -> list[dict[str, list[int]]]:
    """On this machine alone: with the model's weights, and with others."""
    async with a_rollout(model, None, out) as rollout:
        first = await tokens_of(rollout)
        await rollout.update_weights(tiny_weights(tiny_config(), seed=5))
        return [first, await tokens_of(rollout)]


class Campaign:
    """The steps over both machines."""

    def __init__(self, model: str, ray: str, out: Path) -> None:
        self._rollout = a_rollout(model, ray, out)
        self._seen: dict[str, Any] = {}
        self._began_s = time.monotonic()

    async def run(self) -> dict[str, Any]:
        rollout, seen = self._rollout, self._seen
        async with rollout:
            assert rollout.fleet.pool is not None
            rollout.fleet.pool.transfer = MovingIsFree()
            await self._step("plain", None)
            assert rollout.summary is not None
            names = ("migrations", "node_changes", "migrated_tokens", "loaded_bytes", "far_loaded_bytes")
            seen |= {name: getattr(rollout.summary, name) for name in names}
            self._say(moves_of(rollout.summary))
            seen["nodes"] = [status.node for status in rollout.fleet.view()]
            await self._step("process stopped", lambda: os.kill(self._far_pid(), signal.SIGSTOP))
            await self._up()
            await rollout.update_weights(tiny_weights(tiny_config(), seed=5))
            seen["versions"] = [one.view().weights_version for one in rollout.fleet.instances]
            await self._step("new weights", None)
            cut = await self._step("link cut", cut_link)
            seen["lost requests"] = [[num, cut.recomputed[request]] for request, num in cut.lost_tokens.items()]
            seen["recomputed"] = [sum(cut.recomputed.values()), rollout.summary.recomputed_tokens]
            seen["lost"] = rollout.fleet.num_lost
        self._say("closed")
        return seen

    async def _step(self, name: str, strike: Callable[[], None] | None) -> Once:
        events = Once(strike or (lambda: None))
        async with asyncio.timeout(DEADLINE_S):
            self._seen[name] = await tokens_of(self._rollout, events)
        self._say(name)
        return events

    async def _up(self) -> None:
        async with asyncio.timeout(DEADLINE_S):
            await self._rollout.fleet.wait_until_up()
        self._say("up again")

    def _far(self) -> list[Any]:
        return [one for one in self._rollout.fleet.instances if one.node and one.node.endswith(".2")]

    def _far_pid(self) -> int:
        (far,) = self._far()
        return int(far.pid)

    def _say(self, what: str) -> None:
        print(f"{time.monotonic() - self._began_s:6.1f} s  {what}", flush=True)


def moves_of(summary: Summary) -> str:
    """How many moves stayed inside a machine, and where their KV came from."""
    inside, moves = summary.migrations - summary.node_changes, summary.migrations
    return (
        f"{inside} of {moves} moves stayed inside a machine ({inside / max(1, moves):.0%}); "
        f"{summary.far_loaded_bytes} of {summary.loaded_bytes} bytes of KV came from the other"
    )


def cut_link() -> None:
    subprocess.run(["ip", "link", "set", "eth0", "down"], check=True)


def main() -> None:
    model, ray, out = sys.argv[1], sys.argv[2], Path(sys.argv[3])
    first, second = asyncio.run(expected(model, out))
    print("expected", flush=True)
    seen = asyncio.run(Campaign(model, ray, out).run())
    out.write_text(json.dumps({"expected": first, "expected of new weights": second, **seen}))


if __name__ == "__main__":
    main()
