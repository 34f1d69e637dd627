# SPDX-License-Identifier: Apache-2.0
"""The pictures of `seer simulate --out`: well-formed files that say what they show."""

from __future__ import annotations

from pathlib import Path
from xml.etree import ElementTree

from seer.metrics.events import Ended, InstanceState, Preempted
from seer.report.plots import LEVELS, plot_finish_times, plot_instances, plot_load
from seer.report.svg import PALETTE
from seer.report.timeline import Timeline

SVG = "{http://www.w3.org/2000/svg}"


def a_timeline(num_instances: int = 2, num_requests: int = 20, *, preempted: bool = False) -> Timeline:
    timeline = Timeline(num_instances)
    for instance in range(num_instances):
        timeline(InstanceState(0.0, instance, num_running=8, num_waiting=0, kv_tokens=500))
        timeline(InstanceState(50.0 + instance, instance, num_running=0, num_waiting=0, kv_tokens=0))
    for request in range(num_requests):
        timeline(Ended(5.0 * (request + 1), request, finish_reason="stop", num_generated=1))
    if preempted:
        timeline(Preempted(3.0, 0, 1))
    return timeline


def words(path: Path) -> list[str]:
    return [element.text or "" for element in ElementTree.parse(path).iter(f"{SVG}text")]


def test_load_has_axes_units_and_a_legend(tmp_path: Path) -> None:
    path = tmp_path / "load.svg"
    plot_load(a_timeline(preempted=True), 1000, "math & more, <seer>", path)
    printed = words(path)
    for part in ("math & more, <seer>", "KV memory in use (%)", "running requests", "time (s)", "tail", "100"):
        assert part in printed
    assert {"mean of the instances", "each instance", "preemptions: 1"} <= set(printed)
    titles = [element.text for element in ElementTree.parse(path).iter(f"{SVG}title")]
    assert titles == ["instance 0", "instance 1", "mean"] * 2


def test_without_preemptions_none_are_named(tmp_path: Path) -> None:
    plot_load(a_timeline(), 1000, "t", tmp_path / "load.svg")
    assert not any("preemption" in text for text in words(tmp_path / "load.svg"))


def test_instances_are_shaded_by_load_and_idle_ones_left_white(tmp_path: Path) -> None:
    path = tmp_path / "instances.svg"
    plot_instances(a_timeline(), "t", path)
    shapes = list(ElementTree.parse(path).iter(f"{SVG}path"))
    assert len(shapes) == 1, "both are full, then idle: one shade, and nothing where they are idle"
    assert shapes[0].get("d", "").count("M") == 2
    assert {"instance", "0", "1", "running requests", "8; white is idle", "time (s)"} <= set(words(path))
    assert len(list(ElementTree.parse(path).iter(f"{SVG}rect"))) == 1 + LEVELS


def test_finish_times_name_every_scheduler_in_a_colour_of_its_own(tmp_path: Path) -> None:
    path = tmp_path / "finish.svg"
    names = [f"scheduler-{number}" for number in range(len(PALETTE))]
    plot_finish_times({name: a_timeline() for name in names}, "t", path)
    assert {f"{name} (100 s)" for name in names} <= set(words(path))
    strokes = [element.get("stroke", "") for element in ElementTree.parse(path).iter(f"{SVG}path")]
    assert sorted(strokes) == sorted(PALETTE)
    height = float(ElementTree.parse(path).getroot().get("height", "0"))
    assert all(float(element.get("y", "0")) <= height for element in ElementTree.parse(path).iter(f"{SVG}text"))


def test_runs_in_which_nothing_ended_are_drawn_too(tmp_path: Path) -> None:
    empty = Timeline(1)
    plot_load(empty, 1000, "t", tmp_path / "load.svg")
    plot_instances(empty, "t", tmp_path / "instances.svg")
    plot_finish_times({"seer": empty}, "t", tmp_path / "finish.svg")
    for name in ("load", "instances", "finish"):
        assert "time (s)" in words(tmp_path / f"{name}.svg")
