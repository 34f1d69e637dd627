# SPDX-License-Identifier: Apache-2.0
"""The table at the end of a rollout has what was measured, in words, and nothing that was not used."""

from __future__ import annotations

import dataclasses

from seer.cli.summary_rows import ALWAYS, SHARES, summary_rows
from seer.metrics.summary import Summary

FIELDS = [field.name for field in dataclasses.fields(Summary)]
NUMBERS = dict.fromkeys(FIELDS, 0) | {"makespan_s": 2.0, "idle_share": 0.125}


def test_every_name_is_a_number_of_the_summary() -> None:
    assert set(ALWAYS) | set(SHARES) <= set(FIELDS)


def test_what_was_not_used_has_no_row_and_what_every_run_has_always_has_one() -> None:
    rows = summary_rows(NUMBERS)
    assert [words for words, _ in rows] == list(ALWAYS.values())
    assert ("makespan, s", "2.000") in rows
    assert ("idle share of the instances", "12.5%") in rows
    assert ("preemptions", "0") in rows


def test_what_was_used_has_a_row_with_its_unit() -> None:
    used = {"tool_wait_s": 1.5, "pool_ssd_read_bytes": 4096, "num_turns": 1200}
    rows = summary_rows(NUMBERS | used)
    assert {("tool wait, s", "1.500"), ("pool ssd read bytes", "4,096"), ("turns", "1,200")} <= set(rows)
    assert len(rows) == len(ALWAYS) + len(used)


def test_what_is_not_known_has_no_row() -> None:
    known = {name: value for name, value in NUMBERS.items() if name != "recomputed_tokens"}
    assert "recomputed tokens" not in dict(summary_rows(known))
