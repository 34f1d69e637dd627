"""Plots of runs: load over time (the paper's Figure 3), finish times, and a timeline of instances.

matplotlib is imported when a plot is made, and only then (extra: plot).
"""

from __future__ import annotations

import importlib.util
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from seer.errors import MissingExtra
from seer.report.timeline import Timeline

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

INK, FAINT, ACCENT, ALARM = "#1b2a41", "#b8c4d6", "#1f6feb", "#c0392b"
POINTS = 600
"""Samples along the time axis: more than the pixels of a panel would not show."""
TAIL_SHARE = 0.1


def require_matplotlib() -> None:
    """Refuse before the work rather than after it."""
    if importlib.util.find_spec("matplotlib") is None:
        raise MissingExtra("matplotlib", "plot")


def plot_load(timeline: Timeline, kv_capacity_tokens: int, title: str, path: Path) -> None:
    """KV use and running requests over time: each instance faint, their mean bold, preemptions marked."""
    figure = _figure(9.0, 5.2)
    kv_axes, running_axes = figure.subplots(2, 1, sharex=True)
    times_s = timeline.grid(POINTS)
    kv_share = 100.0 * timeline.kv_tokens(times_s) / kv_capacity_tokens
    running = timeline.running(times_s)
    for axes, rows in ((kv_axes, kv_share), (running_axes, running)):
        for row in rows:
            axes.plot(times_s, row, color=FAINT, linewidth=0.6, zorder=1)
        axes.plot([], [], color=FAINT, linewidth=1.0, label="each instance")
        axes.plot(times_s, rows.mean(axis=0), color=ACCENT, linewidth=2.0, label="mean", zorder=3)
        _mark_tail(axes, timeline, named=axes is running_axes)
        _tidy(axes)
    preemptions_s = timeline.preemptions_s()
    if preemptions_s.size:
        kv_axes.plot(
            preemptions_s,
            np.full(preemptions_s.shape, 103.0),
            "|",
            color=ALARM,
            markersize=5,
            alpha=min(1.0, 200 / preemptions_s.size),
            clip_on=False,
        )
        kv_axes.plot([], [], "|", color=ALARM, label=f"{preemptions_s.size:,} preemptions")
    kv_axes.set_ylim(0, 106)
    kv_axes.set_ylabel("KV memory in use (%)")
    running_axes.set_ylim(bottom=0)
    running_axes.set_ylabel("running requests")
    running_axes.set_xlabel("time (s)")
    running_axes.set_xlim(0, timeline.makespan_s)
    kv_axes.legend(frameon=False, fontsize=8, ncols=3, loc="lower left", bbox_to_anchor=(0.0, 1.0))
    kv_axes.set_title(title, loc="right", color=INK, fontsize=10)
    _save(figure, path)


def plot_instances(timeline: Timeline, title: str, path: Path) -> None:
    """A row per instance, as dark as it is full of requests; white is idle."""
    figure = _figure(9.0, min(9.0, 1.6 + 0.16 * max(8, timeline.num_instances)))
    axes = figure.subplots()
    times_s = timeline.grid(POINTS)
    running = timeline.running(times_s)
    picture = axes.imshow(
        np.where(running == 0, np.nan, running),
        aspect="auto",
        interpolation="nearest",
        cmap="viridis_r",
        vmin=0,
        vmax=max(1.0, float(running.max())),
        extent=(0.0, timeline.makespan_s, timeline.num_instances - 0.5, -0.5),
    )
    figure.colorbar(picture, ax=axes, label="running requests", pad=0.02)
    _mark_tail(axes, timeline)
    axes.set_ylabel("instance")
    axes.set_xlabel("time (s)")
    axes.set_title(f"{title}: white is idle", loc="left", color=INK, fontsize=10)
    _tidy(axes, grid=False)
    _save(figure, path)


def plot_finish_times(timelines: Mapping[str, Timeline], title: str, path: Path) -> None:
    """Share of requests finished over time, a line per scheduler; the dotted line is where the tail begins."""
    figure = _figure(9.0, 4.2)
    axes = figure.subplots()
    colors = ("#6b7a90", "#e69f00", "#56b4e9", "#009e73", ACCENT, ALARM, "#cc79a7", INK, "#8c6d31", "#7b4173")
    for number, (scheduler, timeline) in enumerate(timelines.items()):
        ends_s = timeline.ends_s()
        share = 100.0 * np.arange(1, ends_s.size + 1) / ends_s.size
        color = colors[number % len(colors)]
        axes.step(ends_s, share, where="post", color=color, linewidth=1.8, label=scheduler)
        axes.plot(ends_s[-1], 100.0, "o", color=color, markersize=5, clip_on=False, zorder=4)
    axes.axhline(100.0 * (1 - TAIL_SHARE), color=INK, linewidth=0.8, linestyle=":")
    axes.annotate(
        "tail: the last 10% to finish",
        (1.0, 100.0 * (1 - TAIL_SHARE)),
        xycoords=("axes fraction", "data"),
        xytext=(-4, -11),
        textcoords="offset points",
        ha="right",
        fontsize=8,
        color=INK,
    )
    axes.set_xlim(left=0)
    axes.set_ylim(0, 101)
    axes.set_xlabel("time (s)")
    axes.set_ylabel("requests finished (%)")
    axes.set_title(title, loc="left", color=INK, fontsize=10)
    axes.legend(frameon=False, fontsize=9, loc="lower right", bbox_to_anchor=(1.0, 0.02))
    _tidy(axes)
    _save(figure, path)


def _figure(width: float, height: float) -> Figure:
    require_matplotlib()
    from matplotlib.figure import Figure

    return Figure(figsize=(width, height), layout="constrained")


def _mark_tail(axes: Axes, timeline: Timeline, *, named: bool = True) -> None:
    ends_s = timeline.ends_s()
    if ends_s.size:
        starts_s = ends_s[max(0, int(np.ceil(ends_s.size * (1 - TAIL_SHARE))) - 1)]
        axes.axvline(starts_s, color=INK, linewidth=0.8, linestyle=":", zorder=2)
        axes.annotate(
            " tail" if named else "",
            (starts_s, 1.0),
            xycoords=("data", "axes fraction"),
            xytext=(0, -9),
            textcoords="offset points",
            fontsize=8,
            color=INK,
        )


def _tidy(axes: Axes, *, grid: bool = True) -> None:
    axes.spines[["top", "right"]].set_visible(False)
    axes.tick_params(labelsize=8)
    if grid:
        axes.grid(color="#e6eaf0", linewidth=0.6)
        axes.set_axisbelow(True)


def _save(figure: Figure, path: Path) -> None:
    figure.savefig(path, dpi=130, metadata={"Software": None})
