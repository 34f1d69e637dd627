# SPDX-License-Identifier: Apache-2.0
"""What leases cost and gained, from events."""

from __future__ import annotations

import pytest

from seer.analysis.leases import report_leases
from seer.metrics.events import Decoding, Ended, Event, Extended, InstanceState, Queued, Started, Stopped


def test_an_extension_that_came_too_late_has_the_gap_until_its_request_decodes_again() -> None:
    events: list[Event] = [
        Queued(0.0, 0, 0, 0, 10),
        Started(0.0, 0, 0, 64, None, False),
        Decoding(0.1, 0, 0),
        Extended(1.0, 0, 0, 32, 32),
        Extended(2.0, 0, 0, 32, 64),
        Stopped(3.0, 0, 0, 96, "limit"),  # its lease went to 128
        Started(3.0, 0, 0, 64, 0, True),
        Decoding(3.5, 0, 0),
        Stopped(4.0, 0, 0, 160, "limit"),  # where it was to end
        Started(4.0, 0, 0, 64, 0, True),
        Decoding(4.2, 0, 0),
        Stopped(5.0, 0, 0, 200, "stop"),
        Ended(5.0, 0, 200, "stop"),
    ]
    found = report_leases(events, kv_tokens=100)
    assert (found.num_chunks, found.num_extended, found.num_late) == (3, 2, 1)
    assert found.p99_gap_s == pytest.approx(0.5)


def test_a_lease_of_a_resumed_run_begins_after_what_was_generated_before() -> None:
    events: list[Event] = [
        Queued(0.0, 0, 0, 0, 10, num_generated=200),
        Started(0.0, 0, 0, 64, None, False),
        Extended(1.0, 0, 0, 32, 232),
        Stopped(2.0, 0, 0, 264, "limit"),  # its lease went to 296
        Started(2.0, 0, 0, 64, 0, True),
        Decoding(2.5, 0, 0),
        Stopped(3.0, 0, 0, 280, "stop"),
        Ended(3.0, 0, 280, "stop"),
    ]
    assert report_leases(events, kv_tokens=100).num_late == 1


def test_memory_in_use_counts_only_while_a_request_waits() -> None:
    events: list[Event] = [
        Queued(0.0, 0, 0, 0, 10),
        Queued(0.0, 1, 0, 1, 10),
        Started(0.0, 0, 0, 64, None, False),
        InstanceState(0.0, 0, 1, 0, 90),
        Stopped(2.0, 0, 0, 5, "stop"),
        Ended(2.0, 0, 5, "stop"),
        Started(2.0, 1, 0, 64, None, False),
        InstanceState(2.0, 0, 1, 0, 10),
        Stopped(9.0, 1, 0, 5, "stop"),
        Ended(9.0, 1, 5, "stop"),
    ]
    assert report_leases(events, kv_tokens=100).kv_use == pytest.approx(0.9)
