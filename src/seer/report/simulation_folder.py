# SPDX-License-Identifier: Apache-2.0
"""The folder that `--out` fills: results, and for every scheduler its events, a trace and plots.

DIR/results.json            what `--json` prints
DIR/finish_times.svg        all schedulers in one picture
DIR/<scheduler>/events.jsonl   everything that happened (`seer replay` reads it)
DIR/<scheduler>/trace.json     for ui.perfetto.dev
DIR/<scheduler>/load.svg       KV use and running requests over time
DIR/<scheduler>/instances.svg  a timeline of the instances
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager
from functools import partial
from pathlib import Path
from types import TracebackType
from typing import Any

from seer.errors import InputError
from seer.machine.whole_files import write_whole
from seer.metrics.events import Event
from seer.metrics.jsonl import EventLog
from seer.metrics.perfetto import PerfettoTrace
from seer.report.plots import plot_finish_times, plot_instances, plot_load
from seer.report.timeline import Timeline

_FILES = ("results.json", "finish_times.svg")
_SCHEDULER_FILES = ("events.jsonl", "trace.json", "load.svg", "instances.svg")

__all__ = ["SchedulerRecorder", "SimulationFolder"]


class SimulationFolder:
    """Where the runs of one comparison are kept."""

    def __init__(
        self, path: Path, title: str, num_instances: int, kv_capacity_tokens: int, *, force: bool = False
    ) -> None:
        """Make the folder; one that holds files of its names is refused, unless by force."""
        if not force:
            _refuse_loss(path)
        self._path = path
        self._title = title
        self._num_instances = num_instances
        self._kv_capacity_tokens = kv_capacity_tokens
        self._timelines: dict[str, Timeline] = {}
        self._make(path)

    def recorder(self, scheduler: str, metadata: dict[str, Any]) -> SchedulerRecorder:
        """An event sink that keeps one scheduler's run."""
        folder = self._path / scheduler
        self._make(folder)
        draw = partial(self._draw, scheduler)
        return SchedulerRecorder(folder, self._num_instances, metadata, draw)

    def write_results(self, results: bytes) -> None:
        """Write the numbers, and the picture that compares the schedulers recorded so far."""
        write_whole(self._path / "results.json", results)
        plot_finish_times(self._timelines, self._title, self._path / "finish_times.svg")

    def _draw(self, scheduler: str, timeline: Timeline) -> None:
        self._timelines[scheduler] = timeline
        title = f"{self._title}, {scheduler}"
        folder = self._path / scheduler
        plot_load(timeline, self._kv_capacity_tokens, title, folder / "load.svg")
        plot_instances(timeline, title, folder / "instances.svg")

    @staticmethod
    def _make(folder: Path) -> None:
        try:
            folder.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            message = f"cannot write to {folder}: {error.strerror}"
            raise InputError(message, hint="--out wants a folder") from error


def _refuse_loss(path: Path) -> None:
    names = [*_FILES, *(f"*/{name}" for name in _SCHEDULER_FILES)]
    kept = sorted(str(one.relative_to(path)) for name in names for one in path.glob(name))
    if kept:
        raise InputError(
            f"{path} holds {', '.join(kept[:3])}{' and more' if len(kept) > 3 else ''} already",
            hint="choose another --out, or replace it with --force",
        )


class SchedulerRecorder(AbstractContextManager["SchedulerRecorder"]):
    """Writes what happens while it happens, and the rest when the run is over."""

    def __init__(
        self, folder: Path, num_instances: int, metadata: dict[str, Any], draw: Callable[[Timeline], None]
    ) -> None:
        self._folder = folder
        self._log = EventLog(folder / "events.jsonl", metadata)
        self._trace = PerfettoTrace()
        self._timeline = Timeline(num_instances)
        self._draw = draw

    def __call__(self, event: Event) -> None:
        """Keep one event."""
        self._log(event)
        self._trace(event)
        self._timeline(event)

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._log.__exit__(kind, error, trace)
        if error is None:
            self._trace.write(self._folder / "trace.json")
            self._draw(self._timeline)
