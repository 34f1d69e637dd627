# SPDX-License-Identifier: Apache-2.0
"""Schedulers by name."""

import pytest

from builders import a_scheduler
from seer.context import Context
from seer.errors import ConfigError
from seer.placement import PlacementConfig
from seer.scheduling.divided import Divided
from seer.scheduling.registry import NAMES, SchedulerSettings, make_scheduler, parse_scheduler

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


@pytest.mark.parametrize("name", ["context", "seer-paper"])
def test_the_papers_schedulers_place_as_the_paper_does_whatever_a_run_is_set_to(name: str) -> None:
    settings = SchedulerSettings(placement=PlacementConfig(imbalance_threshold=1))
    scheduler = make_scheduler(parse_scheduler(name), settings, Context(), lambda request: 1)
    assert isinstance(scheduler, Divided)
    assert scheduler._placement == settings.placement.as_in_the_paper()
