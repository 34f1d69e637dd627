"""The embedded engine as a child process makes it: with drafter, budget, its share of the pool, and events.

The engine steps in a thread of its own. What its steps did is gathered there and handed to the event loop a
few times a second, so that watching costs next to nothing.
"""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from typing import Any

from seer.drafting.grouped_drafter import GroupedDrafter
from seer.drafting.live_budget import MeasuredBudget
from seer.engine.local import LocalInstance
from seer.engine.local.active import ActiveChunk
from seer.engine.local.graph_shapes import DEPTHS
from seer.engine.pool_errors import PoolErrorCounter
from seer.engine.step_events import REPORT_S, add_up
from seer.kvpool.base import Pool
from seer.kvpool.open_pool import open_pool
from seer.metrics.events import Decoding, Event, EventSink, Prefilling
from seer.speculation.step_report import StepReport
from seer.types import DraftMode

TREE_PATHS = 2
"""Children of a fork in a draft. A tree costs what a line of as many tokens does to verify, and is right more often."""


class HostedLocal(LocalInstance):
    """`LocalInstance` that owns its drafter and pool, and can be told which drafts the next run wants."""

    def __init__(
        self,
        id: int,
        model_dir: str,
        *,
        drafter: GroupedDrafter | None,
        pool: Pool | None,
        events: EventSink,
        **settings: Any,
    ) -> None:
        on_gpu = str(settings.get("device", "cpu")).startswith("cuda")
        self._own_budget = (
            MeasuredBudget(drafter, max_paths=TREE_PATHS, depths=DEPTHS if on_gpu else None)
            if drafter is not None
            else None
        )
        super().__init__(
            id,
            model_dir,
            drafter=drafter,
            pool=pool,
            budget=self._own_budget,
            on_step=self._watch_step,
            **settings,
        )
        self._own_drafter, self._own_pool = drafter, pool
        self._emit = events
        # Worker's side
        self._gathered: list[Event] = []
        self._steps: list[StepReport] = []
        self._running: dict[tuple[int, int], bool] = {}  # chunk and attempt -> whether it decodes
        self._troubles = PoolErrorCounter(pool) if pool is not None else None
        self._reported_s = 0.0

    async def begin_run(
        self,
        run: str,
        drafts: DraftMode,
        weights_version: int,
        past: Mapping[int, Sequence[Sequence[int]]] | None = None,
    ) -> None:
        """Forget what other runs drafted and left unreported, and draft as this one asks."""
        self._steps, self._gathered = [], []  # nothing steps between two runs
        if self._own_drafter is not None:
            self._own_drafter.begin_run(run, drafts, weights_version)
            self._own_drafter.seed_from(past or {})

    async def close(self) -> None:
        """Free the engine, then what it used."""
        await super().close()
        if self._own_drafter is not None:
            self._own_drafter.close()
        if self._own_pool is not None:
            self._own_pool.close()

    def _watch_step(self, report: StepReport) -> None:
        """After each step, in the worker's thread."""
        if self._own_budget is not None:
            self._own_budget.on_step(report)
        now_s = time.monotonic()  # the clock of the event loops, in every process of this machine
        self._note_chunks(now_s)
        self._steps.append(report)
        if now_s - self._reported_s >= REPORT_S or self._is_last_step():
            self._reported_s = now_s
            # Apart, so that what a plain decoding step costs can be read off the log.
            plain = [step for step in self._steps if not step.num_prefill_tokens]
            mixed = [step for step in self._steps if step.num_prefill_tokens]
            self._gathered.extend(add_up(now_s, self.id, steps) for steps in (plain, mixed) if steps)
            self._steps = []
            if self._troubles is not None and self._engine is not None:
                self._gathered.extend(self._troubles.news(now_s, self.id, self._engine.num_missed_tokens))
            gathered, self._gathered = self._gathered, []
            assert self._loop is not None, "steps come after start"
            self._loop.call_soon_threadsafe(self._deliver_events, gathered)

    def _is_last_step(self) -> bool:
        """Whether everything in hand ends with this step: its report must not come after the last output."""
        assert self._engine is not None, "steps come after start"
        scheduler = self._engine.scheduler
        return not scheduler.waiting and all(active.end is not None for active in scheduler.running)

    def _note_chunks(self, now_s: float) -> None:
        assert self._engine is not None, "steps come after start"
        running = {}
        for active in self._engine.scheduler.running:
            chunk = active.chunk
            key = (chunk.request, chunk.attempt)
            running[key] = active.decoding
            if key not in self._running:
                self._gathered.append(_prefilling(now_s, self.id, active))
            if active.decoding and not self._running.get(key, False):
                self._gathered.append(Decoding(now_s, chunk.request, self.id))
        self._running = running

    def _deliver_events(self, events: list[Event]) -> None:
        for event in events:
            self._emit(event)


def _prefilling(now_s: float, instance: int, active: ActiveChunk) -> Prefilling:
    missing = active.num_context - active.num_found - active.num_loaded
    # The KV of the newest token has never been computed: the step that samples its successor does so.
    recomputed = missing - 1 if active.chunk.num_generated_tokens else 0
    return Prefilling(now_s, active.chunk.request, instance, missing, recomputed, active.num_loaded)


def make_local(id: int, settings: dict[str, Any], events: EventSink) -> HostedLocal:
    """For `InstanceSpec.factory`. `pool` and `draft_servers` are ours; the rest is `LocalInstance`'s."""
    own = dict(settings)
    pool_settings = own.pop("pool", None)
    servers = own.pop("draft_servers", None)
    drafter = GroupedDrafter(tuple(servers), None) if servers is not None else None
    pool = open_pool(pool_settings) if pool_settings is not None else None
    return HostedLocal(id, drafter=drafter, pool=pool, events=events, **own)
