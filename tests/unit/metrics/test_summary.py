# SPDX-License-Identifier: Apache-2.0
"""The numbers of a run, worked out by hand."""

import pytest

from seer.metrics.events import (
    Answered,
    Asked,
    Ended,
    InstanceState,
    Placed,
    PoolErrors,
    PoolUsed,
    Preempted,
    Prefilling,
    Queued,
    Started,
    Stepped,
)
from seer.metrics.summary import Summarizer


def test_throughput_makespan_and_tail() -> None:
    summarizer = Summarizer(1)
    for request in range(20):
        summarizer(Queued(2.0, request, 0, request, 10))
    for request in range(20):
        summarizer(Ended(3.0 + request, request, 100, "stop"))
    summary = summarizer.summary()
    assert summary.makespan_s == 20.0  # from 2 to 22
    assert summary.throughput_tokens_s == pytest.approx(2000 / 20)
    assert summary.tail_s == pytest.approx(2.0)  # the 18th of 20 ended at 20


def test_the_throughput_of_a_resumed_run_leaves_out_what_earlier_parts_had_generated() -> None:
    summarizer = Summarizer(1)
    summarizer(Queued(0.0, 0, 0, 0, 10, num_generated=90))
    summarizer(Queued(0.0, 1, 0, 1, 10, num_generated=100))
    summarizer(Ended(0.0, 1, 100, "stop"))  # it had ended before
    summarizer(Ended(2.0, 0, 110, "stop"))
    summary = summarizer.summary()
    assert (summary.num_tokens, summary.throughput_tokens_s) == (210, 20 / 2)


def test_counts_of_what_went_wrong_and_what_moved() -> None:
    summarizer = Summarizer(2)
    summarizer(Queued(0.0, 0, 0, 0, 10))
    summarizer(Started(0.0, 0, 0, 100, None, False))
    summarizer(Preempted(1.0, 0, 0))
    summarizer(Stepped(1.5, 0, 4, 0.1, 8, 0, 8, 0, 0, num_preempted=2))  # an engine that does not say whose
    summarizer(Prefilling(2.0, 0, 0, 50, 40, 0))
    summarizer(Started(3.0, 0, 1, 100, 0, True))
    summarizer(Prefilling(3.0, 0, 1, 1, 0, 90))
    summarizer(Started(4.0, 0, 1, 100, 1, False))
    summarizer(Ended(5.0, 0, 300, "stop"))
    summary = summarizer.summary()
    assert (summary.preemptions, summary.recomputed_tokens) == (3, 40)
    assert (summary.migrations, summary.migrated_tokens) == (1, 90)


def test_moves_that_leave_their_node_and_bytes_that_come_from_another_are_counted_apart() -> None:
    summarizer = Summarizer(3)
    summarizer(Queued(0.0, 0, 0, 0, 10))
    for instance, node in enumerate("aab"):
        summarizer(Placed(0.0, instance, node))
    for moved_from, instance in ((None, 0), (0, 1), (1, 2), (2, 2)):
        summarizer(Started(1.0, 0, instance, 100, moved_from, True))
    summarizer(Stepped(2.0, 1, 4, 0.1, 8, 0, 8, 0, 0, loaded_bytes=500))
    summarizer(Stepped(2.0, 2, 4, 0.1, 8, 0, 8, 0, 0, loaded_bytes=700, far_loaded_bytes=600))
    summarizer(Ended(5.0, 0, 300, "stop"))
    summary = summarizer.summary()
    assert (summary.migrations, summary.node_changes) == (2, 1)
    assert (summary.loaded_bytes, summary.far_loaded_bytes) == (1200, 600)


def test_the_pool_s_failures_are_added_up_over_all_instances() -> None:
    summarizer = Summarizer(2)
    summarizer(Queued(0.0, 0, 0, 0, 10))
    summarizer(PoolErrors(1.0, 1, num_failed=2, num_recomputed=64))
    summarizer(PoolErrors(2.0, None, num_failed=1, num_corrupt=3))
    summarizer(Ended(5.0, 0, 300, "stop"))
    summary = summarizer.summary()
    assert (summary.pool_failures, summary.pool_corrupt, summary.pool_recomputed_tokens) == (3, 3, 64)


def pool_used(**counts: int) -> PoolUsed:
    names = ("num_put", "num_refused", "num_hit_dram", "num_hit_ssd", "num_spilled", "num_prefetched")
    return PoolUsed(4.0, block_bytes=10, **dict.fromkeys(names, 0) | counts)


def test_what_the_pool_wrote_to_ssd_and_read_from_it_is_counted_in_bytes() -> None:
    summarizer = Summarizer(2)
    summarizer(Queued(0.0, 0, 0, 0, 10))
    summarizer(pool_used(num_spilled=5, num_hit_ssd=2, num_prefetched=1, num_refused=4))
    summarizer(Ended(5.0, 0, 300, "stop"))
    summary = summarizer.summary()
    assert (summary.pool_ssd_written_bytes, summary.pool_ssd_read_bytes, summary.pool_refused_blocks) == (50, 30, 4)


def test_idle_time_and_acceptance_are_weighted_by_time() -> None:
    summarizer = Summarizer(2)
    summarizer(Queued(0.0, 0, 0, 0, 10))
    summarizer(InstanceState(0.0, 0, 2, 0, 100, 3.0, 2.0))
    summarizer(InstanceState(4.0, 0, 1, 0, 100, 0.0, 1.0))
    summarizer(InstanceState(8.0, 0, 0, 0, 0))
    summarizer(Ended(10.0, 0, 1, "stop"))
    summary = summarizer.summary()
    assert summary.idle_share == pytest.approx((0.2 + 1.0) / 2)  # one idle for 2 of 10 s, one throughout
    assert summary.mean_accepted == pytest.approx((2 * 4 * 2.0 + 1 * 4 * 1.0) / (2 * 4 + 1 * 4))


def test_cancelled_requests_are_left_out_but_for_their_tokens() -> None:
    summarizer = Summarizer(1)
    summarizer(Queued(0.0, 0, 0, 0, 10))
    summarizer(Ended(4.0, 0, 100, "stop"))
    summarizer(Ended(4.0, 1, 70, "cancelled"))
    summary = summarizer.summary()
    assert (summary.num_requests, summary.num_tokens, summary.cancelled_tokens) == (1, 100, 70)


def test_a_group_is_complete_when_its_last_request_ended() -> None:
    summarizer = Summarizer(1)
    for request in range(20):
        summarizer(Queued(1.0, request, request // 2, request % 2, 10))
    for request in range(20):  # the second request of group g ends g + 0.5 s after the first of group 0
        summarizer(Ended(5.0 + request / 2, request, 100, "stop"))
    summary = summarizer.summary()
    assert (summary.group_median_s, summary.group_p90_s, summary.group_last_s) == (8.5, 12.5, 13.5)


def test_a_group_with_a_cancelled_request_never_completes() -> None:
    summarizer = Summarizer(1)
    for request in range(4):
        summarizer(Queued(0.0, request, request // 2, request % 2, 10))
    summarizer(Ended(1.0, 0, 100, "stop"))
    summarizer(Ended(2.0, 1, 100, "stop"))
    summarizer(Ended(3.0, 2, 100, "stop"))
    summarizer(Ended(4.0, 3, 100, "cancelled"))
    summary = summarizer.summary()
    assert (summary.group_median_s, summary.group_p90_s, summary.group_last_s) == (2.0, 2.0, 2.0)
    only_cut = Summarizer(1)
    only_cut(Queued(0.0, 0, 0, 0, 10))
    only_cut(Queued(0.0, 1, 0, 1, 10))
    only_cut(Ended(1.0, 0, 100, "stop"))
    only_cut(Ended(1.0, 1, 100, "cancelled"))
    assert only_cut.summary().group_last_s is None


def test_turns_are_counted_with_their_waits_and_failures() -> None:
    summarizer = Summarizer(1)
    for request in range(2):
        summarizer(Queued(0.0, request, 0, request, 10))
    for event in (Asked(1.0, 0, 1), Answered(3.0, 0, 20, 1), Asked(4.0, 0, 2), Ended(4.5, 0, 30, "stop")):
        summarizer(event)
    for event in (Asked(2.0, 1, 1), Ended(5.0, 1, 8, "failed")):
        summarizer(event)
    summary = summarizer.summary()
    assert (summary.num_turns, summary.tool_wait_s, summary.tool_failures) == (3, 5.5, 1)
