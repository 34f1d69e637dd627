"""Policies by name."""

import pytest

from builders import a_policy
from seer.errors import ConfigError
from seer.scheduling.registry import NAMES, PolicySettings, parse_policy

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


def test_every_promised_policy_exists_and_can_be_made() -> None:
    assert set(NAMES) >= ISSUED
    for name in NAMES:
        a_policy(name)


def test_sd_after_a_name_adds_plain_drafts() -> None:
    assert parse_policy("verl-sync").drafts == "none"
    assert parse_policy("verl-sync+sd").drafts == "own"
    assert parse_policy("seer").drafts == parse_policy("seer-paper").drafts == "grouped"


def test_only_partial_is_off_policy_and_only_oracles_know_lengths() -> None:
    assert [name for name in NAMES if parse_policy(name).off_policy] == ["partial"]
    assert all(("oracle" in name) == parse_policy(name).needs_true_lengths for name in NAMES)


@pytest.mark.parametrize(
    ("name", "hint"), [("ser", "did you mean seer?"), ("verl+xx", "verl"), ("zzz", "one of verl-sync")]
)
def test_an_unknown_policy_is_refused_with_a_hint(name: str, hint: str) -> None:
    with pytest.raises(ConfigError, match="unknown policy") as caught:
        parse_policy(name)
    assert hint in (caught.value.hint or "")


def test_a_chunk_makes_progress() -> None:
    with pytest.raises(ConfigError):
        PolicySettings(chunk_tokens=0)
