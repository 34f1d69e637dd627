# SPDX-License-Identifier: Apache-2.0
"""The report page says what the event log says."""

from __future__ import annotations

from pathlib import Path

import pytest

from seer.analysis.whatif import read_recorded
from seer.errors import InputError
from seer.metrics.events import (
    Answered,
    Asked,
    Dropped,
    Ended,
    Event,
    Extended,
    InstanceState,
    Placed,
    PoolErrors,
    PoolUsed,
    Prefilling,
    Queued,
    Started,
    Stepped,
    Stopped,
)
from seer.metrics.jsonl import EventLog
from seer.report.page import render
from seer.report.run_data import read_run
from seer.runs.run_folder import RunFolder

RUN: list[Event] = [
    Queued(0.0, 0, 0, 0, 10),
    Started(0.0, 0, 0, 16, None, False),
    Stopped(1.0, 0, 0, 16, "limit"),
    Started(1.0, 0, 1, 16, 0, True),
    Prefilling(1.0, 0, 1, 12, 11, 4321),
    Stopped(2.0, 0, 1, 30, "stop"),
    Ended(2.0, 0, 30, "stop"),
]


LIMITS = {"kv_blocks": 8, "block_size": 16, "max_num_seqs": 4, "max_model_len": 128}


def a_run(folder: Path, *more: Event, **manifest: object) -> RunFolder:
    instance_limits = manifest.pop("instance_limits", [])
    run = RunFolder(folder / "run")
    run.create()
    run.write_manifest(
        {
            "command": "rollout",
            "options": {"scheduler": "seer", "instances": 2, "pool": "local", **manifest},
            "limits": LIMITS,
            "instance_limits": instance_limits,
        }
    )
    with EventLog(run.events, {}) as log:
        for event in [*RUN, *more]:
            log(event)
    return run


def a_page(folder: Path, *more: Event, **manifest: object) -> str:
    return render(read_run(a_run(folder, *more, **manifest)))


def test_unlike_instances_and_those_that_joined_have_their_own_limits(tmp_path: Path) -> None:
    small = LIMITS | {"kv_blocks": 2, "max_num_seqs": 1}
    joined = InstanceState(1.5, 2, 1, 0, 32)
    folder = a_run(tmp_path, joined, instance_limits=[LIMITS, small], max_tokens=64)
    run = read_run(folder)
    assert (run.num_instances, len(run.states)) == (3, 3)
    assert [run.kv_tokens(instance) for instance in range(3)] == [128, 32, 128]
    assert run.mean_kv_tokens == 96
    page = render(run)
    assert "on 3 instances" in page
    assert "1 to 4 requests at once each" in page
    with pytest.raises(InputError, match="some of its instances joined"):
        read_recorded(folder)


def test_a_pool_that_failed_is_reported_with_its_price(tmp_path: Path) -> None:
    errors = [PoolErrors(1.5, 1, num_failed=7, num_recomputed=96), PoolErrors(2.0, None, num_corrupt=5)]
    page = a_page(tmp_path, *errors)
    assert "The pool failed:" in page
    assert "7 calls or blocks not served, 5 damaged blocks" in page
    assert "96 tokens computed again because of that" in page


@pytest.mark.parametrize(("pool", "printed"), [("local", "the pool never failed"), ("none", "No pool")])
def test_a_pool_that_did_not_fail_is_not_accused(tmp_path: Path, pool: str, printed: str) -> None:
    page = a_page(tmp_path, pool=pool)
    assert printed in page
    assert "The pool failed" not in page
    assert ("4,321 tokens" in page) == (pool == "local")


def test_what_went_to_ssd_and_what_found_no_room_is_reported(tmp_path: Path) -> None:
    used = PoolUsed(2.0, 1 << 20, 50, 7, 3, 2, num_spilled=5, num_prefetched=1)
    page = a_page(tmp_path, used)
    assert "5.0 MiB written to SSD, 3.0 MiB read from it; 7 blocks found no room in the pool" in page
    assert "SSD" not in a_page(tmp_path / "other")


def test_moves_inside_a_node_are_reported_where_there_are_several(tmp_path: Path) -> None:
    moves: list[Event] = [Placed(0.0, 0, "a"), Placed(0.0, 1, "b"), Queued(2.0, 1, 1, 0, 10)]
    for number, (moved_from, instance) in enumerate(((None, 0), (0, 1))):
        moves += [
            Started(2.0 + number, 1, instance, 16, moved_from, True),
            Stopped(2.5 + number, 1, instance, 9, "parked"),
        ]
    moves += [Stepped(3.0, 1, 4, 0.1, 8, 0, 8, 0, 0, loaded_bytes=2 << 20, far_loaded_bytes=1 << 20)]
    page = a_page(tmp_path, *moves, Ended(4.0, 1, 9, "stop"))
    assert "0 of 2 moves stayed inside a node, 1.0 MiB of 2.0 MiB came from other nodes" in page
    assert "inside a node" not in a_page(tmp_path / "other")


def test_leases_are_shown_where_some_were_extended(tmp_path: Path) -> None:
    again: list[Event] = [
        Queued(2.0, 1, 1, 0, 10),
        Started(2.0, 1, 0, 16, None, False),
        Extended(2.1, 1, 0, 16, 9),
        Stopped(3.0, 1, 0, 20, "parked"),
        Started(3.0, 1, 0, 16, 0, True),
        Stopped(4.0, 1, 0, 25, "stop"),
        Ended(4.0, 1, 25, "stop"),
    ]
    page = a_page(tmp_path, *again)
    assert "<b>1, 1</b><span>leases extended, chunks parked</span>" in page
    assert "<b>0.0 ms</b><span>gap of an extension (p99)</span>" in page
    assert "leases extended" not in a_page(tmp_path / "other")


def test_waiting_for_a_tool_is_seen_in_lanes_and_in_numbers(tmp_path: Path) -> None:
    turns: list[Event] = [
        Queued(2.0, 1, 1, 0, 10),
        Queued(2.0, 2, 1, 1, 10),
        *(Started(2.0, request, 0, 16, None, False) for request in (1, 2)),
        *(Stopped(2.5, request, 0, 9, "stop") for request in (1, 2)),
        *(Asked(2.5, request, 1) for request in (1, 2)),
        Ended(3.0, 2, 9, "failed"),
        Answered(4.0, 1, 33, 1),
        Started(4.0, 1, 1, 16, 0, True),
        Stopped(4.5, 1, 1, 12, "stop"),
        Asked(4.5, 1, 2),
        Ended(5.0, 1, 12, "stop"),
    ]
    page = a_page(tmp_path, *turns)
    assert "<b>3</b><span>turns that waited for tools</span>" in page
    assert "<b>2.5 s; 0.50 s</b><span>waited for tools, all together; median</span>" in page
    assert "<b>2</b><span>waited for tools at once, at most</span>" in page
    assert "<b>1</b><span>tool failures</span>" in page
    assert "response 0 waits for its tool after turn 1: 2.50 to 4.00 s, 33 tokens given, answered" in page
    assert (
        "requests that wait for their tools</title>" in page
        or 'aria-label="requests that wait for their tools"' in page
    )
    other = a_page(tmp_path / "other")
    assert "tool failures" not in other
    assert "waits for its tool after" not in other


def test_the_waste_of_dropped_groups_is_reported(tmp_path: Path) -> None:
    page = a_page(tmp_path, Dropped(2.0, 0, 1, 30, 1.25), Dropped(2.0, 1, 1, 70, 2.0))
    assert "<b>100 tokens, 3.2 s</b><span>wasted on 2 groups that were dropped</span>" in page
    assert "wasted on" not in a_page(tmp_path / "other")


def test_a_comparison_says_which_numbers_are_medians_and_which_of_one_run(tmp_path: Path) -> None:
    run = read_run(a_run(tmp_path))
    note = f"of a scheduler's first run; from the timeline on, of {run.title} alone"
    assert note not in render(run)
    row = {
        "scheduler": "seer",
        "throughput_tokens_s": 1.0,
        "speedup": 1.0,
        "makespan_s": 2.0,
        "tail_s": 1.0,
        "idle_share": 0.0,
        "migrations": 0,
        "preemptions": 0,
        "accepted_tokens": 0,
        "oracle_s": 1.0,
        "oracle_share": 0.5,
        "different_responses": 0,
    }
    assert note in render(run, rows=[row])
