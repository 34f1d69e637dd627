# SPDX-License-Identifier: Apache-2.0
"""What a run is doing while it runs: a bar of finished groups on stderr and a line of numbers; terminals only."""

from __future__ import annotations

import asyncio
import time
from collections import deque
from typing import TYPE_CHECKING

import rich.progress
from rich.console import Console
from rich.text import Text

from seer.hosting.health import Health, InstanceStatus
from seer.metrics.events import Event, InstanceState

if TYPE_CHECKING:
    from collections.abc import Iterable

    from rich.console import RenderableType

    from seer.api import Rollout

REDRAW_S = 0.5
"""Numbers that change more often cannot be read, and each redraw visits every request."""
RATE_WINDOW_S = 10.0
"""Long enough to smooth over prefills, short enough to follow the batch as it shrinks."""

SHOWN_AILING = 4
"""Instances that are not healthy, named in the line; of more only the number."""


class Progress:
    """Shows a rollout's current run until it is stopped; also an event sink."""

    def __init__(
        self, rollout: Rollout, *, label: str = "", quiet: bool = False, console: Console | None = None
    ) -> None:
        self._rollout = rollout
        self._accepted: dict[int, float] = {}
        self._samples: deque[tuple[float, int]] = deque()
        self._updates: asyncio.Task[None] | None = None
        self._began_s = time.monotonic()
        console = console or Console(stderr=True)
        self._is_shown = console.is_terminal and not quiet
        self._bar = _BarAndLine(
            rich.progress.TextColumn("{task.description}"),
            rich.progress.BarColumn(),
            rich.progress.MofNCompleteColumn(),
            rich.progress.TextColumn("groups"),
            rich.progress.TimeElapsedColumn(),
            console=console,
            auto_refresh=False,  # the run's state is read by the event loop that changes it, not by a thread
            redirect_stdout=False,  # stdout carries results and may be a file
            disable=not self._is_shown,
        )
        self._groups = self._bar.add_task(label or "rollout", total=None)

    def on_event(self, event: Event) -> None:
        """Remember what only events say."""
        if isinstance(event, InstanceState) and event.num_running:
            self._accepted[event.instance] = event.accepted_per_step

    def start(self) -> None:
        """Show from now on."""
        if self._is_shown:
            self._bar.start()
            self._updates = asyncio.create_task(self._show())

    async def stop(self) -> None:
        """Show the last state and leave it on the screen."""
        if self._updates is None:
            return
        self._updates.cancel()
        await asyncio.gather(self._updates, return_exceptions=True)
        self.update()
        self._bar.stop()

    async def _show(self) -> None:
        while True:
            self.update()
            await asyncio.sleep(REDRAW_S)

    def update(self) -> None:
        """Redraw with the state as it is now."""
        run = self._rollout.current
        if run is not None and run.loop is not None:
            self._bar.update(self._groups, completed=run.num_groups_done, total=run.num_groups_wanted)
        self._bar.line = self.line()
        self._bar.refresh()

    def line(self) -> str:
        """The numbers below the bar."""
        run = self._rollout.current
        if run is None or run.loop is None:
            return "starting"
        buffer, context = run.loop.buffer, run.loop.context
        tokens = left = 0
        for request in buffer.requests():
            tokens += request.num_generated
            if not request.ended:
                left += max(1, context.expected_tokens(request.group) - request.num_generated)
        rate = self._rate(tokens)
        views = [(instance.view(), instance.limits) for instance in self._rollout.fleet.instances]
        running = sum(view.num_running for view, _ in views)
        used = sum(view.used_kv_blocks for view, _ in views)
        room = sum(limits.kv_blocks for _, limits in views)
        accepted = sum(self._accepted.values()) / len(self._accepted) if self._accepted else 1.0
        ailing = _ailing(self._rollout.fleet.view())
        remaining = f"≤{left / rate:.0f} s left" if rate else "time left unknown"
        return (
            f"{buffer.num_ended}/{buffer.num_admitted} responses, {tokens:,} tokens, {rate:.0f} tokens/s, "
            f"{running} running, KV {100 * used / max(1, room):.0f}%, {accepted:.2f} tokens/step, {remaining}{ailing}"
        )

    def _rate(self, tokens: int) -> float:
        now_s = time.monotonic()
        self._samples.append((now_s, tokens))
        while now_s - self._samples[0][0] > RATE_WINDOW_S:
            self._samples.popleft()
        first_s, first = self._samples[0]
        if now_s - first_s < REDRAW_S / 2:
            return tokens / max(1e-9, now_s - self._began_s)
        return (tokens - first) / (now_s - first_s)


def _ailing(statuses: list[InstanceStatus]) -> str:
    """The instances that are not as they should be, by number and state."""
    fine = (Health.HEALTHY, Health.RETIRED)
    shown = [f"instance {one.id} {one.health.value}" for one in statuses if one.health not in fine]
    more = f" and {len(shown) - SHOWN_AILING} more" if len(shown) > SHOWN_AILING else ""
    return f"; {', '.join(shown[:SHOWN_AILING])}{more}" if shown else ""


class _BarAndLine(rich.progress.Progress):
    """A bar, and below it a line that wraps where the terminal is narrow."""

    line = ""

    def get_renderables(self) -> Iterable[RenderableType]:
        """Both, as rich asks for them."""
        yield self.make_tasks_table(self.tasks)
        yield Text(self.line)
