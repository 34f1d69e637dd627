# SPDX-License-Identifier: Apache-2.0
"""A recorded run replays to the same plan."""

from dataclasses import fields
from pathlib import Path

import pytest

from seer.errors import InputError
from seer.metrics.jsonl import EventLog
from seer.sim.catalog import WorkloadOptions, load_workload
from seer.sim.cluster import Speculation, simulate
from seer.sim.costs import InstanceCost
from seer.sim.replay import _Cost, read_recording, replay, run_metadata

OPTIONS = WorkloadOptions(groups=12, group_size=4, mean=900, maximum=6000, instances=3, seed=5)


def record(path: Path, scheduler: str, speculation: Speculation = "auto") -> None:
    workload = load_workload("synthetic", OPTIONS)
    with EventLog(path, run_metadata(workload, scheduler, speculation, seed=5)) as log:
        simulate(workload, scheduler, speculation=speculation, events=log)


@pytest.mark.parametrize("scheduler", ["verl-sync", "verl+sd", "divided", "context", "seer-paper", "seer", "oracle"])
def test_a_recorded_run_replays_to_the_same_plan(scheduler: str, tmp_path: Path) -> None:
    record(tmp_path / "log", scheduler)
    recording = read_recording(tmp_path / "log")
    assert recording.workload == load_workload("synthetic", OPTIONS)
    assert replay(recording) == list(recording.started)


def test_conversations_replay_to_the_same_plan(tmp_path: Path) -> None:
    options = WorkloadOptions(groups=3, group_size=2, mean=200, maximum=600, instances=2, seed=5)
    workload = load_workload("agent-tools", options)
    with EventLog(tmp_path / "log", run_metadata(workload, "seer", "auto", seed=5)) as log:
        simulate(workload, "seer", events=log)
    recording = read_recording(tmp_path / "log")
    assert recording.workload.turns == workload.turns
    assert replay(recording) == list(recording.started)


def test_every_number_of_a_cost_is_recorded() -> None:
    costs = {field.name for field in fields(InstanceCost)} - {"model", "gpu"}
    assert costs == set(_Cost.__struct_fields__)


def test_a_recording_that_was_cut_or_cancelled_is_refused(tmp_path: Path) -> None:
    record(tmp_path / "log", "partial")
    with pytest.raises(InputError, match="was cancelled"):
        read_recording(tmp_path / "log")
    record(tmp_path / "log", "verl")
    lines = (tmp_path / "log").read_text().splitlines()
    (tmp_path / "cut").write_text("\n".join(lines[: len(lines) // 2]) + "\n")
    with pytest.raises(InputError, match="never ended"):
        read_recording(tmp_path / "cut")
    (tmp_path / "bare").write_text('{"kind":"header","schema":1,"metadata":{}}\n')
    with pytest.raises(InputError, match="does not describe a simulated run"):
        read_recording(tmp_path / "bare")
