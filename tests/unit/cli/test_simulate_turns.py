# SPDX-License-Identifier: Apache-2.0
"""`seer simulate` on workloads with turns: rows for each way of waiting, and options that only they take."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from seer.cli.main import main
from seer.sim.catalog import WorkloadOptions, load_workload

SWE = ["simulate", "agent-swe", "--group-size", "1", "--schedulers", "seer"]
TOOLS = ["simulate", "agent-tools", "--groups", "6", "--group-size", "2", "--mean", "100", "--max", "400"]


def rows_of(capsys: pytest.CaptureFixture[str], *words: str) -> list[dict[str, Any]]:
    assert main([*words, "--json", "--no-timing"]) == 0
    rows: list[dict[str, Any]] = json.loads(capsys.readouterr().out)
    return rows


def test_every_scheduler_has_a_row_for_each_way_of_waiting(capsys: pytest.CaptureFixture[str]) -> None:
    rows = rows_of(capsys, *TOOLS, "--schedulers", "verl,seer")
    assert [(row["scheduler"], row["while_waiting"]) for row in rows] == [
        (scheduler, way) for scheduler in ("verl", "seer") for way in ("hold", "recompute", "park")
    ]
    assert len({(row["num_turns"], row["given_tokens"], row["tool_wait_s"]) for row in rows}) == 1
    assert rows == rows_of(capsys, *TOOLS, "--schedulers", "verl,seer")


def test_agent_swe_has_the_recorded_tokens_and_turns_and_parking_computes_next_to_nothing_again(
    capsys: pytest.CaptureFixture[str],
) -> None:
    workload = load_workload("agent-swe")
    assert (workload.num_requests, workload.num_tokens) == (200, 208_489)
    assert sum(len(one.ends) for one in workload.turns) == 2_454
    [parked] = rows_of(capsys, *SWE, "--while-waiting", "park")
    assert parked["num_tokens"] == load_workload("agent-swe", WorkloadOptions(group_size=1)).num_tokens
    assert parked["recomputed_share"] <= 0.01


def test_seeds_arrange_the_same_tasks_anew() -> None:
    first, second = (load_workload("agent-swe", WorkloadOptions(seed=seed)) for seed in (0, 1))
    assert sorted(first.lengths) == sorted(second.lengths)
    assert first.lengths != second.lengths


def test_tools_are_as_the_options_say(capsys: pytest.CaptureFixture[str]) -> None:
    words = ["--schedulers", "seer", "--while-waiting", "park", "--tool-s", "90", "--tool-sigma", "0"]
    [row] = rows_of(capsys, *TOOLS, *words, "--turns", "3", "--given-tokens", "7000")
    assert row["tool_wait_s"] == 90 * row["num_turns"]
    assert row["num_turns"] <= 3 * row["num_requests"]
    assert row["given_tokens"] > 1000 * row["num_requests"]


def test_the_table_names_the_ways_and_describes_the_tools(capsys: pytest.CaptureFixture[str]) -> None:
    for seeds in ("0", "0..1"):
        assert main([*TOOLS, "--schedulers", "seer", "--seeds", seeds]) == 0
        shown = capsys.readouterr().out
        assert all(name in shown for name in ("seer, hold", "seer, recompute", "seer, park"))
        assert "turns, tools take" in shown


def test_a_recorded_simulation_with_turns_is_replayed_chunk_for_chunk(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main([*TOOLS, "--schedulers", "seer", "--out", str(tmp_path)]) == 0
    for way in ("hold", "recompute", "park"):
        assert main(["replay", str(tmp_path / f"seer-{way}" / "events.jsonl")]) == 0
        assert "the plan is the same" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("words", "named"),
    [
        ([*TOOLS, "--while-waiting", "sleep"], "--while-waiting"),
        ([*TOOLS, "--while-waiting", "park,park"], "--while-waiting"),
        ([*TOOLS, "--schedulers", "partial"], "partial"),
        ([*TOOLS, "--iterations", "2"], "agent-tools"),
        ([*SWE, "--turns", "3"], "--turns"),
        ([*SWE, "--mean", "3"], "--mean"),
        ([*SWE[:2], "--group-size", "5"], "group size 5"),
        ([*SWE, "--max", "1000"], "maximum 1000"),
        (["simulate", "synthetic", "--while-waiting", "park"], "--while-waiting"),
        (["simulate", "synthetic", "--tool-s", "1"], "--tool-s"),
        (["simulate", "moonlight", "--given-tokens", "10"], "--given-tokens"),
    ],
)
def test_what_has_no_meaning_is_refused(words: list[str], named: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(words) == 2
    assert named in capsys.readouterr().err.splitlines()[0]
