# SPDX-License-Identifier: Apache-2.0
"""An event log is read only if its events can have happened."""

from __future__ import annotations

from pathlib import Path

import pytest

from seer.errors import InputError
from seer.metrics.events import Ended, Event, Extended, InstanceState, Queued, Started, Stopped
from seer.metrics.jsonl import EventLog
from seer.metrics.run_events import count_instances, read_run_events

QUEUED = Queued(0.0, 0, 0, 0, 10)
STARTED = Started(0.0, 0, 0, 16, None, False)
STOPPED = Stopped(1.0, 0, 0, 16, "limit")
ENDED = Ended(2.0, 0, 30, "stop")


def a_log(path: Path, *events: Event) -> Path:
    with EventLog(path, {}) as log:
        for event in events:
            log(event)
    return path


def test_what_can_have_happened_is_read(tmp_path: Path) -> None:
    resumed = Queued(0.0, 1, 0, 1, 10, num_generated=30)
    events: list[Event] = [QUEUED, STARTED, STOPPED, STARTED, STOPPED, ENDED, resumed, Ended(2.0, 1, 30, "stop")]
    assert read_run_events(a_log(tmp_path / "e", *events), 1) == events


def test_instances_that_joined_the_run_are_of_it(tmp_path: Path) -> None:
    """They tell of their state; the first may do so before they are given work, or after another one."""
    joined = [InstanceState(0.5, instance, 0, 0, 0) for instance in (2, 1)]
    events: list[Event] = [QUEUED, STARTED, *joined, STOPPED, Started(1.0, 0, 2, 16, 0, True)]
    assert read_run_events(a_log(tmp_path / "e", *events), 1) == events
    assert (count_instances(events, 1), count_instances(events, 3), count_instances(events[:2], 1)) == (3, 3, 1)


@pytest.mark.parametrize(
    ("events", "why"),
    [
        ([QUEUED, Started(0.0, 0, 1, 16, None, False)], "line 3: instance 1 of 1"),
        ([QUEUED, Started(0.0, 0, 0, 16, 1, False)], "instance 1 of 1"),
        ([InstanceState(0.0, 2, 0, 0, 0)], "line 2: instance 2 of 1"),
        ([InstanceState(0.0, 1, 0, 0, 0), InstanceState(0.0, 3, 0, 0, 0)], "line 3: instance 3 of 2"),
        ([InstanceState(0.0, -1, 0, 0, 0)], "instance=-1"),
        ([InstanceState(-1.0, 0, 0, 0, 0)], r"t_s=-1\.0"),
        ([QUEUED, QUEUED], "was queued before"),
        ([QUEUED, ENDED, QUEUED], "was queued before"),
        ([STARTED], "is not there"),
        ([QUEUED, ENDED, STARTED], "had ended"),
        ([QUEUED, ENDED, ENDED], "had ended"),
        ([QUEUED, STARTED, STARTED], "starts twice"),
        ([QUEUED, STOPPED], "stops without a start"),
        ([QUEUED, Extended(0.5, 0, 0, 16, 9)], "is extended and does not run"),
        ([QUEUED, STARTED, STOPPED, Extended(2.5, 0, 0, 16, 9)], "is extended and does not run"),
        ([QUEUED, Ended(2.0, 0, 30, "bored")], "finish_reason 'bored'"),
        ([Queued(0.0, 0, 0, 0, 10, num_generated=31), ENDED], "ends with fewer tokens than it was queued with"),
    ],
)
def test_what_cannot_have_happened_is_refused_by_line(tmp_path: Path, events: list[Event], why: str) -> None:
    with pytest.raises(InputError, match=why):
        read_run_events(a_log(tmp_path / "e", *events), 1)


def test_a_line_that_was_cut_off_is_left_out_only_where_that_is_allowed(tmp_path: Path) -> None:
    path = a_log(tmp_path / "e", QUEUED, STARTED)
    path.write_bytes(path.read_bytes()[:-5])
    assert read_run_events(path, 1, allow_cut=True) == [QUEUED]
    with pytest.raises(InputError, match="line 3"):
        read_run_events(path, 1)
