# SPDX-License-Identifier: Apache-2.0
"""An instance that serves rollout after rollout, each with new weights, keeps nothing of the earlier ones.

The instance dials in from this process, so that what it holds can be counted here; the draft server is a process.
"""

from __future__ import annotations

import asyncio
import os
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("torch")

import torch
from safetensors.torch import load_file

from dialled import Dialled
from held_memory import grown_since, held, may_grow
from inbox import OutputInbox
from seer.drafting.client import shard_of
from seer.drafting.grouped_drafter import GroupedDrafter
from seer.drafting.ids import number_of
from seer.engine.local.engine import Engine
from seer.engine.local.hosted import HostedLocal
from seer.engine.local.tiny import make_tiny_model
from seer.hosting.draft_server_process import DraftServerProcess
from seer.hosting.messages import BeginRun
from seer.metrics.events import EventSink
from seer.types import Chunk, Sampling

NUM_GROUPS, SAMPLES, MAX_TOKENS = 32, 5, 6
PER_ROLLOUT = NUM_GROUPS * SAMPLES
NUM_ROLLOUTS = 20
EARLIER_NAMES = 5000
"""Groups and requests of rollouts before those that are looked at: caches that are bounded are full then."""
LEAKED_BLOCKS = 2
"""For each tensor that is read from a file, by safetensors 0.8.0 (docs/log.md)."""


class Bench:
    """An instance, and what it needs for rollouts."""

    def __init__(self, instance: Dialled, inbox: OutputInbox, weights: Mapping[str, torch.Tensor]) -> None:
        self.instance, self.inbox, self.weights = instance, inbox, weights
        self.number = 0

    async def roll_out(self, num_rollouts: int) -> None:
        """Each under a version of the weights of its own."""
        for _ in range(num_rollouts):
            self.number += 1
            await self.instance.update_weights(self.weights, self.number)
            await self.instance.inner.configure(BeginRun(f"run-{self.number}", "grouped", self.number))
            for request in range(PER_ROLLOUT):
                self.instance.submit(a_chunk(request, self.number))
            await self.inbox.ends(*range(PER_ROLLOUT))
            self.inbox.outputs.clear()
            for group in range(NUM_GROUPS):
                self.instance.inner.end_group(group)

    async def grown(self) -> dict[str, int]:
        """What NUM_ROLLOUTS rollouts leave behind."""
        before = held()
        await self.roll_out(NUM_ROLLOUTS)
        return grown_since(before)

    def too_much(self, growth: Mapping[str, int]) -> set[str]:
        most = may_grow(NUM_ROLLOUTS * PER_ROLLOUT)
        most["blocks"] += LEAKED_BLOCKS * len(self.weights) * NUM_ROLLOUTS
        return {name for name, count in growth.items() if count > most[name]}


def a_chunk(request: int, number: int) -> Chunk:
    group = request // SAMPLES
    return Chunk(
        request=request,
        group=group,
        attempt=1,
        num_prompt_tokens=4,
        num_generated_tokens=0,
        max_tokens=MAX_TOKENS,
        sampling=Sampling(max_tokens=MAX_TOKENS),
        seed=1000 * number + request,
        weights_version=number,
        prompt=[3 + group, 7, 11, 5 + group],
    )


def on_a_bench(tmp_path: Path, scenario: Callable[[Bench], Any]) -> Any:
    """Run a scenario with an instance that drafts from a server."""
    folder = make_tiny_model(tmp_path / "tiny")

    async def main() -> Any:
        server = DraftServerProcess()
        await server.start()
        drafter = GroupedDrafter((server.address,), server.client_keys)

        def make(id: int, settings: dict[str, Any], events: EventSink) -> HostedLocal:
            return HostedLocal(id, str(folder), drafter=drafter, pool=None, events=events, kv_blocks=256)

        instance, inbox = Dialled(make), OutputInbox()
        await instance.start(inbox)
        try:
            bench = Bench(instance, inbox, load_file(folder / "model.safetensors"))
            for number in range(EARLIER_NAMES):
                number_of(f"earlier/{number}")
                shard_of(1000 + number, 1)
            await bench.roll_out(NUM_ROLLOUTS)
            return await scenario(bench)
        finally:
            await instance.close()
            await server.close()

    return asyncio.run(main())


def test_an_instance_keeps_nothing_of_rollouts_that_are_over(tmp_path: Path) -> None:
    async def scenario(bench: Bench) -> None:
        growth = await bench.grown()
        assert not bench.too_much(growth), f"{growth} over {NUM_ROLLOUTS * PER_ROLLOUT} requests"

    on_a_bench(tmp_path, scenario)


def test_what_an_instance_keeps_of_every_request_is_noticed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Leaks that are planted where chunks enter; each is seen by the measure that should see it."""
    kept: list[Any] = []
    leaks: dict[str, Callable[[Chunk], object]] = {
        "objects": lambda chunk: kept.append([chunk]),
        "blocks": lambda chunk: kept.append(os.urandom(64)),
    }
    add = Engine.add

    async def scenario(bench: Bench) -> None:
        for name, leak in leaks.items():

            def add_and_keep(engine: Engine, chunk: Chunk, leak: Callable[[Chunk], object] = leak) -> None:
                add(engine, chunk)
                leak(chunk)

            monkeypatch.setattr(Engine, "add", add_and_keep)
            assert name in bench.too_much(await bench.grown())
            kept.clear()

    on_a_bench(tmp_path, scenario)
