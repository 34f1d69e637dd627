# SPDX-License-Identifier: Apache-2.0
"""Schedulers by name."""

import pytest

from builders import a_scheduler
from seer.errors import ConfigError
from seer.scheduling.registry import NAMES, SchedulerSettings, parse_scheduler

ISSUED = {
    "verl-sync",
    "verl",
    "group",
    "streamrl-oracle",
    "partial",
    "divided",
    "context",
    "oracle",
    "seer",
    "seer-paper",
}


def test_every_promised_scheduler_exists_and_can_be_made() -> None:
    assert set(NAMES) >= ISSUED
    for name in NAMES:
        a_scheduler(name)


def test_sd_after_a_name_adds_plain_drafts() -> None:
    assert parse_scheduler("verl-sync").drafts == "none"
    assert parse_scheduler("verl-sync+sd").drafts == "own"
    assert parse_scheduler("seer").drafts == "grouped"
    assert parse_scheduler("seer-paper").drafts == "grouped-paper"


def test_only_partial_is_off_policy_and_only_oracles_know_lengths() -> None:
    assert [name for name in NAMES if parse_scheduler(name).off_policy] == ["partial"]
    assert all(("oracle" in name) == parse_scheduler(name).needs_true_lengths for name in NAMES)


@pytest.mark.parametrize(
    ("name", "hint"), [("ser", "did you mean seer?"), ("verl+xx", "verl"), ("zzz", "one of verl-sync")]
)
def test_an_unknown_scheduler_is_refused_with_a_hint(name: str, hint: str) -> None:
    with pytest.raises(ConfigError, match="unknown scheduler") as caught:
        parse_scheduler(name)
    assert hint in (caught.value.hint or "")


def test_a_chunk_makes_progress() -> None:
    with pytest.raises(ConfigError):
        SchedulerSettings(chunk_tokens=0)
