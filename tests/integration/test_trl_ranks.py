# SPDX-License-Identifier: Apache-2.0
"""Two ranks: one rollout on the main one, for both, the same as a single rank would have made."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("trl")

import trl_rank
from two_ranks import run_two


@pytest.fixture(scope="module")
def two_ranks(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    """What each of two processes found."""
    return run_two(Path(trl_rank.__file__), tmp_path_factory.mktemp("ranks"))


def test_two_ranks_get_what_one_would(two_ranks: list[dict[str, Any]], tmp_path: Path) -> None:
    alone = trl_rank.a_run(tmp_path, 1)
    first, second = (found["completions"] for found in two_ranks)
    assert len(first) == len(second) == 2
    # Of the first step; afterwards gradients are summed in another order, and the weights' last bits differ.
    assert first[0] + second[0] == alone["completions"][0]


def test_the_main_rank_alone_has_instances(two_ranks: list[dict[str, Any]]) -> None:
    assert [found["has_instances"] for found in two_ranks] == [True, False]


def test_a_failure_of_the_main_rank_is_raised_on_both(two_ranks: list[dict[str, Any]]) -> None:
    main, other = (found["error"] for found in two_ranks)
    assert "0.001 s" in main
    assert other == f"the rollout failed on the main rank: DeadlineExceeded: {main}"
