# SPDX-License-Identifier: Apache-2.0
"""The live numbers: requests by state, sums that only grow, and memory that follows what has not ended."""

from __future__ import annotations

from seer.metrics.events import Answered, Asked, Ended, Event, Extended, Placed, Queued, Started, Stepped, Stopped
from seer.metrics.histograms import Histogram
from seer.metrics.live_counts import LiveCounts
from seer.metrics.live_timeline import MAX_SPANS, TOOLS, LiveTimeline


def play(*events: Event) -> tuple[LiveCounts, LiveTimeline]:
    counts = LiveCounts()
    timeline = LiveTimeline(counts)
    for event in events:
        counts(event)
        timeline(event)
    return counts, timeline


def test_a_request_is_queued_then_running_then_parked_then_gone() -> None:
    events: list[Event] = [
        Queued(0.0, 7, 1, 0, 10),
        Started(2.0, 7, 0, 64, None, True),
        Extended(3.0, 7, 0, 64, 30),
        Stopped(4.0, 7, 0, 60, "parked"),
        Started(5.0, 7, 1, 64, 0, True),
        Stopped(6.0, 7, 1, 90, "stop"),
        Ended(6.0, 7, 90, "stop"),
    ]
    states = [play(*events[: i + 1])[0].requests_by_state() for i in range(len(events))]
    assert [next(iter(state), None) for state in states] == [
        *("queued", "running", "running", "parked", "running", "parked", None)
    ]
    counts, _ = play(*events)
    assert counts.per_instance["generation_tokens"] == {0: 60, 1: 30}
    assert (counts.migrations, counts.prompt_tokens, counts.ended) == (1, 10, {"stop": 1})
    assert counts.queue_s.total == 2.0
    assert counts.latency_s.total == 6.0
    assert not counts.open


def test_between_turns_a_request_is_at_its_tool() -> None:
    turn: list[Event] = [
        Queued(0.0, 7, 1, 0, 10),
        Started(2.0, 7, 0, 64, None, True),
        Stopped(4.0, 7, 0, 60, "stop"),
        Asked(4.0, 7, 1),
        Answered(5.0, 7, 20, 1),
    ]
    assert play(*turn[:-1])[0].requests_by_state() == {"at_tool": 1}
    assert play(*turn)[0].requests_by_state() == {"parked": 1}
    rows = [span.as_row() for span in play(*turn)[1].spans()]
    assert rows == [[0, 0, 1, 0, 2.0, 4.0, "stop"], [1, TOOLS, 1, 0, 4.0, 5.0, "answered"]]
    failed = play(*turn[:-1], Ended(6.0, 7, 60, "failed"))[1].spans()
    assert (failed[-1].instance, failed[-1].end_s, failed[-1].reason) == (TOOLS, 6.0, "failed")


def test_a_count_that_goes_back_after_a_loss_adds_nothing_twice() -> None:
    counts, _ = play(
        Queued(0.0, 1, 1, 0, 10),
        Started(1.0, 1, 0, 64, None, True),
        Extended(2.0, 1, 0, 64, 50),
        Stopped(3.0, 1, 0, 40, "lost"),
        Started(4.0, 1, 1, 64, 0, True),
        Stopped(5.0, 1, 1, 70, "limit"),
    )
    assert counts.generated_tokens() == 70


def test_what_an_earlier_part_of_a_run_had_generated_is_not_counted_again() -> None:
    counts, _ = play(
        Queued(0.0, 1, 1, 0, 10, num_generated=40),
        Started(1.0, 1, 0, 64, None, True),
        Stopped(3.0, 1, 0, 70, "stop"),
    )
    assert counts.generated_tokens() == 30


def test_moves_to_another_node_are_counted_where_instances_say_where_they_are() -> None:
    counts = LiveCounts()
    for instance, node in enumerate("aab"):
        counts(Placed(0.0, instance, node))
    counts(Queued(0.0, 0, 0, 0, 10))
    for moved_from, instance in ((None, 0), (0, 1), (1, 2)):
        counts(Started(1.0, 0, instance, 100, moved_from, True))
    assert (counts.migrations, counts.node_changes) == (2, 1)


def test_step_times_are_counted_once_per_step() -> None:
    counts, _ = play(Stepped(1.0, 0, 10, 0.05, 100, 0, 10, 0, 0))
    assert sum(counts.step_s[0].counts) == 10
    assert dict(counts.step_s[0].cumulative())["0.005"] == 10


def test_a_histogram_counts_each_value_in_the_first_bound_that_is_not_below_it() -> None:
    histogram = Histogram((1, 2))
    for value in (0.5, 1, 1.5, 3):
        histogram.observe(value)
    assert histogram.cumulative() == [("1.0", 2), ("2.0", 3), ("+Inf", 4)]


def test_spans_that_run_are_sent_until_they_end_and_once_after() -> None:
    counts, timeline = play(
        Queued(0.0, 1, 5, 0, 10),
        Queued(0.0, 2, 5, 1, 10),
        Started(1.0, 1, 0, 64, None, True),
        Started(1.0, 2, 0, 64, None, True),
        Stopped(2.0, 2, 0, 9, "stop"),
    )
    assert [(span.request, span.end_s) for span in timeline.spans()] == [(2, 2.0), (1, None)]
    since = timeline.newest
    for event in (Stopped(3.0, 1, 0, 9, "limit"), Ended(3.0, 1, 9, "length")):
        counts(event)
        timeline(event)
    assert {span.request for span in timeline.spans(since)} >= {1}
    assert timeline.spans(timeline.newest) == []


def test_what_is_left_is_guessed_from_the_longest_sibling() -> None:
    _, timeline = play(
        *(Queued(0.0, i, 5, i, 10) for i in range(3)),
        *(Started(1.0, i, 0, 64, None, True) for i in range(3)),
        Stopped(2.0, 0, 0, 100, "stop"),
        Ended(2.0, 0, 100, "stop"),
        Extended(2.0, 1, 0, 64, 30),
    )
    assert timeline.tokens_left() == (70 + 100, 100)
    assert play(Queued(0.0, 1, 1, 0, 10))[1].tokens_left() is None


def test_memory_follows_what_has_not_ended() -> None:
    events: list[Event] = []
    for i in range(3 * MAX_SPANS):
        events += [
            Queued(i, i, i // 4, i % 4, 10),
            Started(i, i, 0, 64, None, True),
            Stopped(i, i, 0, 5, "stop"),
            Ended(i, i, 5, "stop"),
        ]
    counts, timeline = play(*events)
    assert not counts.open
    assert len(timeline.spans()) == MAX_SPANS
    assert not timeline._groups
    assert not timeline._group_of
