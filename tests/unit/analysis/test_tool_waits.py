# SPDX-License-Identifier: Apache-2.0
"""Waits for tools, in numbers and in traces."""

from __future__ import annotations

import json
from pathlib import Path

from seer.analysis.tool_waits import ToolWait, median_s, most_at_once, tool_waits, total_s
from seer.metrics.events import Answered, Asked, Ended, Event, Queued, Started, Stopped
from seer.metrics.perfetto import TOOLS, write_trace

EVENTS: list[Event] = [
    Queued(0.0, 0, 0, 0, 5),
    Queued(0.0, 1, 0, 1, 5),
    Started(0.0, 0, 0, 8, None, False),
    Stopped(1.0, 0, 0, 8, "stop"),
    Asked(1.0, 0, 1),
    Started(1.0, 1, 0, 8, None, False),
    Stopped(2.0, 1, 0, 8, "stop"),
    Asked(2.0, 1, 1),
    Answered(4.0, 0, 12, 1),
    Started(5.0, 0, 0, 8, 0, True),
    Ended(6.0, 1, 8, "stop"),
    Stopped(7.0, 0, 0, 16, "limit"),
    Ended(7.0, 0, 16, "length"),
]


def test_a_wait_lasts_from_its_question_to_its_answer_or_end() -> None:
    waits = tool_waits(EVENTS)
    assert waits == [ToolWait(0, 1, 1.0, 4.0, "answered", 12), ToolWait(1, 1, 2.0, 6.0, "stop", 0)]
    assert (median_s(waits), most_at_once(waits), total_s(waits)) == (3.5, 2, 7.0)
    assert (median_s([]), most_at_once([]), total_s([])) == (0.0, 0, 0)
    assert tool_waits(EVENTS, first_s=0.5)[0][2:4] == (0.5, 3.5)


def test_a_wait_that_ends_in_failure_is_one_that_failed() -> None:
    failed = tool_waits([*EVENTS[:-3], Ended(6.0, 1, 8, "failed")])[-1]
    assert (failed.has_failed, failed.request) == (True, 1)
    assert not any(one.has_failed for one in tool_waits(EVENTS))


def test_a_trace_shows_waits_as_slices_of_their_own(tmp_path: Path) -> None:
    write_trace(EVENTS, tmp_path / "trace.json")
    records = json.loads((tmp_path / "trace.json").read_text())["traceEvents"]
    waits = [record for record in records if record["pid"] == TOOLS and record["ph"] == "X"]
    assert [(one["args"]["request"], one["ts"], one["dur"]) for one in waits] == [(0, 1e6, 3e6), (1, 2e6, 4e6)]
    assert {one["tid"] for one in waits} == {0, 1}
    assert any(record["ph"] == "M" and record["args"]["name"] == "tools" for record in records)
