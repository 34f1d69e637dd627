# SPDX-License-Identifier: Apache-2.0
"""Event logs and traces."""

import json
from itertools import pairwise
from pathlib import Path

import pytest

from builders import a_workload, roll_out
from seer.errors import InputError
from seer.metrics.events import Placed
from seer.metrics.jsonl import SCHEMA, EventLog, read_events, read_header
from seer.metrics.perfetto import write_trace
from seer.report.timeline import Timeline

WORKLOAD = a_workload([[300, 200], [500, 10]], kv_tokens=640)


def test_a_log_reads_back_as_it_was_written(tmp_path: Path) -> None:
    events = roll_out(WORKLOAD, "verl").events
    with EventLog(tmp_path / "log", {"scheduler": "verl"}) as log:
        for event in events:
            log(event)
    assert list(read_events(tmp_path / "log")) == events
    assert read_header(tmp_path / "log").metadata == {"scheduler": "verl"}
    assert len((tmp_path / "log").read_text().splitlines()) == 1 + len(events)


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ("", "not an event log"),
        ("hello", "not an event log"),
        ('{"kind":"queued"}\n', "not an event log"),
        (f'{{"kind":"header","schema":{SCHEMA + 1},"metadata":{{}}}}\n', "follows schema"),
        (f'{{"kind":"header","schema":{SCHEMA},"metadata":{{}}}}\n{{"kind":"no"}}\n', "line 2"),
        (f'{{"kind":"header","schema":{SCHEMA},"metadata":{{}}}}\n{{"kind":"queued","t_', "line 2"),
    ],
)
def test_what_is_no_log_is_refused(content: str, message: str, tmp_path: Path) -> None:
    (tmp_path / "log").write_text(content)
    with pytest.raises(InputError, match=message):
        list(read_events(tmp_path / "log"))


def test_a_missing_log_is_refused(tmp_path: Path) -> None:
    with pytest.raises(InputError, match="no event log"):
        read_header(tmp_path / "log")


def test_in_a_trace_slices_of_a_track_never_overlap_and_add_up_to_the_chunks(tmp_path: Path) -> None:
    run = roll_out(WORKLOAD, "verl")
    write_trace(run.events, tmp_path / "trace.json")
    records = json.loads((tmp_path / "trace.json").read_text())["traceEvents"]
    slices = sorted((r for r in records if r["ph"] == "X"), key=lambda r: (r["pid"], r["tid"], r["ts"]))
    for before, after in pairwise(slices):
        if (before["pid"], before["tid"]) == (after["pid"], after["tid"]):
            assert before["ts"] + before["dur"] <= after["ts"] + 1e-3
    assert {r["name"] for r in slices} == {"queued", "prefill", "decode"}
    assert sum("end" in r["args"] for r in slices) == len(run.started)
    assert any(r["ph"] == "i" for r in records) == any(type(e).__name__ == "Preempted" for e in run.events)
    assert {r["args"]["name"] for r in records if r["ph"] == "M"} == {"instance 0", "instance 1"}
    assert {r["name"] for r in records if r["ph"] == "C"} == {"requests", "KV tokens"}


def test_a_trace_names_the_nodes_of_instances(tmp_path: Path) -> None:
    placed = [Placed(0.0, 0, "10.0.0.1"), Placed(5.0, 0, "10.0.0.2"), Placed(6.0, 0, "10.0.0.2")]
    write_trace([*placed, *roll_out(WORKLOAD, "verl").events], tmp_path / "trace.json")
    records = json.loads((tmp_path / "trace.json").read_text())["traceEvents"]
    names = {r["args"]["name"] for r in records if r["ph"] == "M"}
    assert names == {"instance 0 on 10.0.0.1, then 10.0.0.2", "instance 1"}


def test_a_timeline_samples_the_state_in_force(tmp_path: Path) -> None:
    run = roll_out(WORKLOAD, "verl")
    timeline = Timeline(2)
    for event in run.events:
        timeline(event)
    assert timeline.makespan_s == run.makespan_s()
    assert timeline.ends_s().size == 4
    times_s = timeline.grid(50)
    assert timeline.running(times_s).shape == (2, 50)
    assert timeline.running(times_s).max() <= 2
    assert timeline.kv_tokens(times_s).max() <= 640
