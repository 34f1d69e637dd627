# SPDX-License-Identifier: Apache-2.0
"""Drafts per model: acceptance, plain speculation, and what verifying and drafting cost."""

from dataclasses import replace

import pytest

from builders import a_cost, a_workload
from seer.sim.cluster import simulate
from seer.sim.draft_model import DraftModel, PlainDrafts, acceptance_for
from seer.sim.speculation import PAPER_TABLE_2


@pytest.mark.parametrize(("length", "depth"), [(1.67, 16), (2.19, 3), (1.74, 1)])
def test_the_acceptance_rate_gives_the_length(length: float, depth: int) -> None:
    rate = acceptance_for(length, depth)
    assert sum(rate**i for i in range(depth + 1)) == pytest.approx(length, abs=1e-6)


def test_a_level_scales_the_accepted_drafts_and_not_the_token_sampled_in_any_case() -> None:
    half = dict(DraftModel(level=0.5).scaled(PAPER_TABLE_2[1]))
    assert half[0] == pytest.approx(1.35)
    assert half[15] == pytest.approx(1.765)


def test_each_further_verified_token_reads_its_share_of_the_context() -> None:
    once = a_cost()
    again = replace(once, verify_context_share=0.5)
    assert again.step(8, 1.0) == once.step(8, 1.0)
    ratio = again.step(8, 3.0).per_context_token_s / once.step(8, 1.0).per_context_token_s
    assert ratio == pytest.approx(2.0)


def test_a_draft_model_takes_a_pass_for_every_token_whatever_the_batch() -> None:
    index = a_cost()
    model = replace(index, draft_pass_s=0.01)
    for num_requests in (1, 50):
        more_s = model.step(num_requests, 4.0).base_s - index.step(num_requests, 4.0).base_s
        assert more_s == pytest.approx(0.03)
    assert model.step(8, 1.0) == index.step(8, 1.0)


def test_plain_speculation_is_the_workloads_own() -> None:
    workload = a_workload([[400] * 4] * 2, instances=1, kv_tokens=8192, chunk_tokens=512)
    sure = replace(workload, drafts=DraftModel(plain=PlainDrafts(acceptance=1.0, max_depth=1)))
    gained = simulate(sure, "verl+sd").summary
    assert gained.mean_accepted == pytest.approx(2.0, rel=0.05)
    dear = replace(sure, drafts=DraftModel(plain=PlainDrafts(acceptance=1.0, max_depth=1, pass_s=10.0)))
    assert simulate(dear, "verl+sd").summary.mean_accepted == pytest.approx(1.0)
