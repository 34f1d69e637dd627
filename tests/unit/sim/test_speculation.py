# SPDX-License-Identifier: Apache-2.0
"""Speculation in the simulator: acceptance by references and paths, and sizes by batch."""

from __future__ import annotations

import pytest

from seer.sim.costs import H800, MODELS, InstanceCost
from seer.sim.speculation import PAPER_TABLE_2, PATH_GAIN, AcceptanceCurve, Sizes, SpeculationModel, acceptance_at
from seer.speculation.throughput import MAX_DEPTH, DraftSize

COST = InstanceCost(model=MODELS["qwen2-vl-72b"], gpu=H800, num_gpus=8)


def sizes(model: SpeculationModel, num_probes: int, num_others: int) -> Sizes:
    return model.sizes(COST, num_probes, num_others, 1000.0 * (num_probes + num_others), 0.6)


@pytest.mark.parametrize("paths", [1, 2, 4])
def test_the_papers_acceptance_lengths_are_met_at_its_depth(paths: int) -> None:
    for references, length in PAPER_TABLE_2[paths]:
        accepted = acceptance_at(AcceptanceCurve().rate(references))
        assert accepted.gain(DraftSize(MAX_DEPTH * paths, paths)) == pytest.approx(length, rel=0.01)


def test_more_paths_gain_more_only_with_more_tokens() -> None:
    accepted = acceptance_at(0.6)
    for tokens in (1, 2, 4):
        gains = [accepted.gain(DraftSize(tokens, paths)) for paths in PATH_GAIN]
        assert gains == sorted(gains, reverse=True), f"{tokens} tokens are spread over more paths"
    deep = [accepted.gain(DraftSize(8 * paths, paths)) for paths in PATH_GAIN]
    assert deep == sorted(deep)


def test_drafts_grow_deep_and_wide_where_few_requests_run() -> None:
    model = SpeculationModel(grouped=True)
    alone, few, many = (sizes(model, 0, num_requests).others for num_requests in (1, 16, 512))
    assert alone.tokens > 16
    assert alone.paths == 4
    assert alone.tokens > few.tokens > many.tokens


def test_plain_speculation_drafts_one_path_and_knows_no_probes() -> None:
    alone = sizes(SpeculationModel(grouped=False, rule="paper"), 1, 1)
    assert alone.probes == alone.others == DraftSize(MAX_DEPTH)


def test_the_papers_rule_drafts_one_path_with_a_depth_for_probes() -> None:
    found = sizes(SpeculationModel(grouped=True, rule="paper"), 4, 60)
    assert found.probes.paths == found.others.paths == 1
    assert 0 < found.probes.tokens < found.others.tokens
