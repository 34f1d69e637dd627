# SPDX-License-Identifier: Apache-2.0
"""Two ranks with DeepSpeed: ZeRO 1 and 2 leave each rank the whole weights, and ZeRO 3 is refused."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("trl")
pytest.importorskip("deepspeed", reason="pip install deepspeed: it builds a module for CPUs at its first start")

import trl_deepspeed_rank
from two_ranks import run_two


@pytest.fixture(scope="module")
def two_ranks(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    """What each of two processes found."""
    script, folder = Path(trl_deepspeed_rank.__file__), tmp_path_factory.mktemp("deepspeed")
    return run_two(script, folder, deadline_s=280, for_cpus=("DS_ACCELERATOR", "cpu"))


@pytest.mark.parametrize("stage", ["stage 1", "stage 2"])
def test_every_rollout_with_deepspeed_is_on_policy(two_ranks: list[dict[str, Any]], stage: str) -> None:
    for found in (rank[stage] for rank in two_ranks):
        assert (found["engine"], found["num_ranks"]) == ("DeepSpeedEngine", 2)
        assert [len(one) for one in found["completions"]] == [12, 12, 12]
    gaps = two_ranks[0][stage]["gaps"]
    assert len(gaps) == 3
    assert max(gaps) < 1e-5, gaps
    assert two_ranks[1][stage]["gaps"] == [], "the main rank alone rolls out"


def test_the_stage_that_spreads_weights_is_refused_on_every_rank(two_ranks: list[dict[str, Any]]) -> None:
    assert all("ZeRO stage 3 is not supported" in rank["stage 3"] for rank in two_ranks)
