# SPDX-License-Identifier: Apache-2.0
"""The embedded engine as a child process makes it: with drafter, draft budget, pool and events.

The engine steps in a worker thread. Events are collected there and handed to the event loop every
`step_events.REPORT_S`, and with the last step of a batch.

Invariants
  1. When the last chunks end, their events reach the event loop before their outputs.
  2. Drafter and pool belong to the hosted instance: `close` closes them after the engine.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from seer.config import LocalEngineConfig
from seer.drafting.grouped_drafter import GroupedDrafter
from seer.drafting.live_budget import TREES, MeasuredBudget
from seer.engine.base import OutputSink
from seer.engine.instance_settings import read_settings
from seer.engine.instance_wrapper import ModelInstanceWrapper
from seer.engine.local import LocalInstance
from seer.engine.local.active import ActiveChunk
from seer.engine.local.assembly import MEMORY_SHARE
from seer.engine.local.graph_shapes import DEPTHS
from seer.engine.pool_errors import PoolErrorCounter
from seer.engine.step_events import StepTally
from seer.kvpool.base import Pool
from seer.kvpool.open_pool import join_pool
from seer.metrics.events import Decoding, Event, EventSink, Prefilling
from seer.speculation.step_profile import StepProfile
from seer.speculation.step_report import StepReport
from seer.speculation.throughput import MAX_PATHS, MAX_TOKENS, DraftLimits
from seer.types import DraftMode

GPU_TREES = DraftLimits(tuple(depth for depth in DEPTHS if depth <= MAX_TOKENS), MAX_PATHS, is_uniform=True)
"""A step's drafts are padded to one of these sizes, each of which has a captured graph."""


class HostedLocal(ModelInstanceWrapper[LocalInstance]):
    """A `LocalInstance` with its own drafter and pool, whose steps are reported as events."""

    def __init__(
        self,
        id: int,
        model_dir: str,
        *,
        drafter: GroupedDrafter | None,
        pool: Pool | None,
        events: EventSink,
        step_profile: StepProfile | None = None,
        **settings: Any,
    ) -> None:
        on_gpu = str(settings.get("device", "cpu")).startswith("cuda")
        self._drafter, self._pool, self._emit = drafter, pool, events
        limits = GPU_TREES if on_gpu else TREES
        self._budget = MeasuredBudget(drafter, limits, start=step_profile) if drafter is not None else None
        instance = LocalInstance(
            id, model_dir, drafter=drafter, pool=pool, budget=self._budget, on_step=self._on_step, **settings
        )
        super().__init__(instance)
        self._loop: asyncio.AbstractEventLoop | None = None
        # Worker thread only
        self._tally = StepTally(id)
        self._events: list[Event] = []
        self._running: dict[tuple[int, int], bool] = {}  # (request, attempt) -> whether it decodes
        self._pool_errors = PoolErrorCounter(pool) if pool is not None else None

    async def start(self, sink: OutputSink) -> None:
        """Start the engine; events go to the loop that runs now."""
        self._loop = asyncio.get_running_loop()
        await super().start(sink)

    async def begin_run(
        self, run: str, drafts: DraftMode, weights_version: int, past: Mapping[int, Sequence[Sequence[int]]]
    ) -> None:
        """Drop drafts and unreported steps of earlier runs, and draft as this run asks."""
        self._tally.clear()  # safe from this thread: the engine does not step between two runs
        self._events = []
        if self._drafter is not None:
            self._drafter.begin_run(run, drafts, weights_version)
            self._drafter.seed_from(past)

    def end_group(self, group: int) -> None:
        """Forget a group's tokens. The engine has none of its requests: the driver has seen all of them end."""
        if self._drafter is not None:
            self._drafter.drop(group)

    async def close(self) -> None:
        """Close the engine, then its drafter and pool."""
        await super().close()
        if self._drafter is not None:
            self._drafter.close()
        if self._pool is not None:
            self._pool.close()

    def _on_step(self, report: StepReport) -> None:
        """Runs after each step, in the worker thread."""
        if self._budget is not None:
            self._budget.on_step(report)
        now_s = time.monotonic()  # the clock of the event loops, in every process of this machine
        self._note_chunks(now_s)
        self._tally.add(report)
        if self._tally.is_due(now_s) or self._is_last_step():
            self._events.extend(self._tally.take(now_s))
            if self._pool_errors is not None:
                self._events.extend(self._pool_errors.delta(now_s, self.id, self.inner.engine.num_missed_tokens))
            events, self._events = self._events, []
            assert self._loop is not None, "steps come after start"
            self._loop.call_soon_threadsafe(self._deliver_events, events)

    def _is_last_step(self) -> bool:
        """Whether every chunk ends with this step: its events must not come after the last output."""
        scheduler = self.inner.engine.scheduler
        return not scheduler.waiting and all(active.end is not None for active in scheduler.running)

    def _note_chunks(self, now_s: float) -> None:
        running = {}
        for active in self.inner.engine.scheduler.running:
            chunk = active.chunk
            key = (chunk.request, chunk.attempt)
            running[key] = active.decoding
            if key not in self._running:
                self._events.append(_prefilling(now_s, self.id, active))
            if active.decoding and not self._running.get(key, False):
                self._events.append(Decoding(now_s, chunk.request, self.id))
        self._running = running

    def _deliver_events(self, events: list[Event]) -> None:
        for event in events:
            self._emit(event)


def _prefilling(now_s: float, instance: int, active: ActiveChunk) -> Prefilling:
    missing = active.num_entered - active.num_found - active.num_loaded
    # The newest token's KV has never been computed: the step that samples the next token computes it.
    begun = active.num_entered > active.chunk.num_prompt_tokens
    recomputed = max(0, missing - 1 - active.chunk.num_fresh_tokens) if begun else 0
    return Prefilling(now_s, active.chunk.request, instance, missing, recomputed, active.num_loaded)


def make_local(id: int, settings: dict[str, Any], events: EventSink) -> HostedLocal:
    """For `InstanceSpec.factory`; `settings` are those of `InstanceSettings`, as plain values."""
    given = read_settings(settings)
    config, engine = given.config, given.engine_settings(LocalEngineConfig)
    servers = given.draft_servers
    return HostedLocal(
        id,
        config.model,
        drafter=GroupedDrafter(servers, given.draft_keys) if servers is not None else None,
        pool=join_pool(given.pool) if given.pool is not None else None,
        events=events,
        step_profile=StepProfile.load(Path(given.step_profile)) if given.step_profile is not None else None,
        kv_blocks=config.kv.blocks,
        kv_memory_bytes=config.kv.memory_bytes,
        memory_share=MEMORY_SHARE if engine.memory_share is None else engine.memory_share,
        block_size=config.kv.block_size,
        max_num_seqs=given.max_num_seqs,
        max_waiting=engine.max_waiting,
        max_model_len=config.max_model_len,
        max_step_tokens=engine.max_step_tokens,
        dtype=config.dtype,
        device=config.device,
        stream_tokens=engine.stream_tokens,
        threads=engine.threads,
        matrices_dir=given.matrices_dir,
    )
