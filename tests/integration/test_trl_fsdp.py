# SPDX-License-Identifier: Apache-2.0
"""Two ranks with the model spread over them by FSDP2: the rollout has the whole weights, and the check both ranks."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("trl")
pytest.importorskip("peft")

import trl_fsdp_rank
from two_ranks import run_two


@pytest.fixture(scope="module")
def two_ranks(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    """What each of two processes found."""
    return run_two(Path(trl_fsdp_rank.__file__), tmp_path_factory.mktemp("fsdp"), deadline_s=280)


@pytest.mark.parametrize("trained", ["whole", "lora"])
def test_every_rollout_of_a_sharded_model_is_on_policy(two_ranks: list[dict[str, Any]], trained: str) -> None:
    for found in (rank[trained] for rank in two_ranks):
        assert found["is_sharded"]
        assert len(found["completions"]) > 3, "an evaluation was rolled out too"
    found = two_ranks[0][trained]
    assert len(found["gaps"]) == 3
    assert found["eval_gaps"]
    assert max(found["gaps"] + found["eval_gaps"]) < 1e-5, found
    assert found["versions"] == [0, 1, 2]


def test_a_sharded_model_gets_the_tokens_of_a_whole_one(two_ranks: list[dict[str, Any]], tmp_path: Path) -> None:
    alone = trl_fsdp_rank.a_run(tmp_path, 1)
    first, second = (rank["whole"]["completions"] for rank in two_ranks)
    # Of the first step; afterwards gradients are summed in another order, and the weights' last bits differ.
    assert first[0] + second[0] == alone["completions"][0]


def test_an_error_while_weights_are_gathered_leaves_no_rank_waiting(two_ranks: list[dict[str, Any]]) -> None:
    main, other = (rank["full disk"] for rank in two_ranks)
    assert "No space left" in main
    assert other == f"the rollout failed on the main rank: OSError: {main}"
