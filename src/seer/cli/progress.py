"""What a run is doing, while it does it: one line on stderr, redrawn on a terminal, else repeated."""

from __future__ import annotations

import asyncio
import sys
import time
from collections import deque
from typing import TYPE_CHECKING

from seer.metrics.events import Event, InstanceState

if TYPE_CHECKING:
    from seer.api import Rollout

REDRAW_S = 0.5
REPEAT_S = 15.0
RATE_WINDOW_S = 10.0


class Progress:
    """Shows a rollout's current run until it is stopped; also an event sink."""

    def __init__(self, rollout: Rollout, *, label: str = "", quiet: bool = False) -> None:
        self._rollout = rollout
        self._label = f"{label} " if label else ""
        self._quiet = quiet
        self._is_terminal = sys.stderr.isatty()
        self._accepted: dict[int, float] = {}
        self._samples: deque[tuple[float, int]] = deque()
        self._task: asyncio.Task[None] | None = None
        self._began_s = time.monotonic()

    def on_event(self, event: Event) -> None:
        """Remember what only events tell."""
        if isinstance(event, InstanceState) and event.num_running:
            self._accepted[event.instance] = event.accepted_per_step

    def start(self) -> None:
        """Show from now on."""
        if not self._quiet:
            self._task = asyncio.create_task(self._show())

    async def stop(self) -> None:
        """Show the last state and leave the line."""
        if self._task is None:
            return
        self._task.cancel()
        await asyncio.gather(self._task, return_exceptions=True)
        if self._is_terminal:
            sys.stderr.write(f"\r\x1b[K{self.line()}\n")

    async def _show(self) -> None:
        while True:
            await asyncio.sleep(REDRAW_S if self._is_terminal else REPEAT_S)
            sys.stderr.write(f"\r\x1b[K{self.line()}" if self._is_terminal else f"{self.line()}\n")
            sys.stderr.flush()

    def line(self) -> str:
        """The state in one line."""
        run = self._rollout.current
        elapsed_s = time.monotonic() - self._began_s
        if run is None or run.loop is None:
            return f"{self._label}starting, {elapsed_s:.0f} s"
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
        remaining = f"≤{left / rate:.0f} s left" if rate else "time left unknown"
        return (
            f"{self._label}{run.num_groups_done}/{len(run.groups_asked)} groups, "
            f"{buffer.num_ended}/{buffer.num_admitted} responses, {tokens:,} tokens, {rate:.0f} tokens/s, "
            f"{running} running, KV {100 * used / max(1, room):.0f}%, {accepted:.2f} tokens/step, "
            f"{elapsed_s:.0f} s, {remaining}"
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
