"""The embedded engine as a child process makes it: with drafter, budget, its share of the pool, and events.

The engine steps in a thread of its own. What its steps did is gathered there and handed to the event loop a
few times a second, so that watching costs next to nothing.
"""

from __future__ import annotations

import time
from typing import Any

from seer.engine.drafter import StepReport
from seer.engine.host.drafts import Drafts, GroupedDrafter, MeasuredBudget
from seer.engine.local import LocalInstance
from seer.kvpool.base import Pool
from seer.metrics.events import Decoding, Event, EventSink, Stepped

REPORT_S = 0.25


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
        self._own_budget = MeasuredBudget(drafter) if drafter is not None else None
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
        self._decoding: set[tuple[int, int]] = set()
        self._reported_s = 0.0

    async def begin_run(self, run: str, drafts: Drafts, epoch: int) -> None:
        """Forget what other runs drafted and left unreported, and draft as this one asks."""
        self._steps, self._gathered = [], []  # nothing steps between two runs
        if self._own_drafter is not None:
            self._own_drafter.begin_run(run, drafts, epoch)

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
        self._note_decoding(now_s)
        self._steps.append(report)
        if now_s - self._reported_s >= REPORT_S or self._is_last_step():
            self._reported_s = now_s
            # Apart, so that what a plain decoding step costs can be read off the log.
            plain = [step for step in self._steps if not step.num_prefill_rows]
            mixed = [step for step in self._steps if step.num_prefill_rows]
            self._gathered.extend(_add_up(now_s, self.id, steps) for steps in (plain, mixed) if steps)
            self._steps = []
            gathered, self._gathered = self._gathered, []
            assert self._loop is not None, "steps come after start"
            self._loop.call_soon_threadsafe(self._deliver_events, gathered)

    def _is_last_step(self) -> bool:
        """Whether everything in hand ends with this step: its report must not come after the last output."""
        assert self._engine is not None, "steps come after start"
        scheduler = self._engine.scheduler
        return not scheduler.waiting and all(active.end is not None for active in scheduler.running)

    def _note_decoding(self, now_s: float) -> None:
        assert self._engine is not None, "steps come after start"
        decoding = set()
        for active in self._engine.scheduler.running:
            if active.decoding:
                key = (active.chunk.request, active.chunk.attempt)
                decoding.add(key)
                if key not in self._decoding:
                    self._gathered.append(Decoding(now_s, active.chunk.request, self.id))
        self._decoding = decoding

    def _deliver_events(self, events: list[Event]) -> None:
        for event in events:
            self._emit(event)


def _add_up(now_s: float, instance: int, steps: list[StepReport]) -> Stepped:
    # A report may stand for a burst of equal steps; its time and rows are then those of one of them.
    return Stepped(
        now_s,
        instance,
        num_steps=sum(step.num_steps for step in steps),
        duration_s=sum(step.duration_s * step.num_steps for step in steps),
        num_rows=sum(step.num_rows * step.num_steps for step in steps),
        num_prefill_rows=sum(step.num_prefill_rows * step.num_steps for step in steps),
        num_emitted=sum(step.num_emitted for step in steps),
        num_drafted=sum(step.num_drafted for step in steps),
        num_accepted=sum(step.num_accepted for step in steps),
    )


def make_local(id: int, settings: dict[str, Any], events: EventSink) -> HostedLocal:
    """For `InstanceSpec.factory`. `pool` and `draft_servers` are ours; the rest is `LocalInstance`'s."""
    own = dict(settings)
    pool_settings = own.pop("pool", None)
    servers = own.pop("draft_servers", None)
    drafter = GroupedDrafter(tuple(servers), None) if servers is not None else None
    pool: Pool | None = None
    if pool_settings is not None:
        from seer.kvpool.local import LocalPool  # noqa: PLC0415 - native module, only where it is asked for
        from seer.kvpool.local_files import LocalPoolConfig  # noqa: PLC0415

        pool = LocalPool(LocalPoolConfig(**pool_settings))
    return HostedLocal(id, drafter=drafter, pool=pool, events=events, **own)
