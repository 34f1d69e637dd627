# SPDX-License-Identifier: Apache-2.0
"""Drafts do not change the distribution of the sampled tokens; a broken verification does.

Many short samples from one prompt, with drafts that propose likely tokens first: if verification favoured a draft in
any way, the counts of the first tokens would lean towards it. Chi-square against exact probabilities.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import pytest

torch = pytest.importorskip("torch")

from engines import FunctionDrafter, a_chunk, always, an_engine, generate
from seer.drafting.base import DraftAsk, DraftTree
from seer.engine.local import engine as engine_module
from seer.engine.local import runner as runner_module
from seer.engine.local.batch import Work, build
from seer.engine.local.sampling import SampleRow
from seer.engine.local.tiny import make_tiny_model
from seer.engine.local.tree_walk import Walk, walk

PROMPT = [5, 17, 9, 60]
NUM_SAMPLES = 4000
VOCAB = 24


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_tiny_model(tmp_path_factory.mktemp("model"), vocab_size=VOCAB * 4, seed=3)


def exact(folder: Path) -> dict[tuple[int, int], float]:
    """P(first two tokens) after the prompt, from plain forward passes."""
    probabilities: dict[tuple[int, int], float] = {}
    first = _next_distribution(folder, PROMPT)
    likely = sorted(range(len(first)), key=lambda token: -first[token])[:6]
    for a in likely:
        second = _next_distribution(folder, [*PROMPT, a])
        for b in sorted(range(len(second)), key=lambda token: -second[token])[:6]:
            probabilities[a, b] = first[a] * second[b]
    return probabilities


def _next_distribution(folder: Path, context: list[int]) -> list[float]:
    """Read off the model by forcing each token: log-probabilities of one-token continuations."""
    engine = an_engine(folder, kernels="torch")
    with torch.inference_mode():
        engine.add(a_chunk(0, context, max_tokens=1))
        works = engine.scheduler.plan()
        engine.scheduler.add_contexts(works)
        batch = build(works, engine.scheduler.cache.block_size, engine.scheduler.cache.first_scratch_slot)
        return engine.model.forward(batch, engine.scheduler.tables).softmax(-1)[0].tolist()


def sample(folder: Path) -> Counter[tuple[int, int]]:
    """First two tokens of many samples, with trees that propose the likeliest tokens."""
    first = _next_distribution(folder, PROMPT)
    favourites = sorted(range(len(first)), key=lambda token: -first[token])[:3]

    def propose(ask: DraftAsk) -> DraftTree:
        return DraftTree([*favourites, favourites[0]], [None, None, None, 0])

    engine = an_engine(folder, max_num_seqs=32, drafter=FunctionDrafter(propose), budget=always(6))
    # A one-token lead-in makes every sample's second and third tokens decode steps, which drafts reach.
    chunks = [a_chunk(i, PROMPT, max_tokens=3, seed=i) for i in range(NUM_SAMPLES)]
    answers = generate(engine, chunks)
    assert engine.num_drafted > NUM_SAMPLES
    return Counter((answer.ids[0], answer.ids[1]) for answer in answers.values())


def chi_square(counts: Counter[tuple[int, int]], probabilities: dict[tuple[int, int], float]) -> tuple[float, int]:
    """The statistic and its degrees of freedom; all other outcomes are one class."""
    rest = 1 - sum(probabilities.values())
    seen_rest = NUM_SAMPLES - sum(counts[pair] for pair in probabilities)
    classes = [(counts[pair], p) for pair, p in probabilities.items() if p * NUM_SAMPLES >= 5]
    rare = sum(p for p in probabilities.values() if p * NUM_SAMPLES < 5)
    seen_rare = sum(counts[pair] for pair, p in probabilities.items() if p * NUM_SAMPLES < 5)
    classes.append((seen_rest + seen_rare, rest + rare))
    statistic = sum((n - NUM_SAMPLES * p) ** 2 / (NUM_SAMPLES * p) for n, p in classes)
    return statistic, len(classes) - 1


def far_too_large(statistic: float, freedom: int) -> bool:
    """Beyond six standard deviations (Wilson-Hilferty), a chance of about one in a billion."""
    z = ((statistic / freedom) ** (1 / 3) - (1 - 2 / (9 * freedom))) / (2 / (9 * freedom)) ** 0.5
    return bool(z > 6)


def test_drafts_leave_the_distribution_alone(folder: Path) -> None:
    statistic, freedom = chi_square(sample(folder), exact(folder))
    assert not far_too_large(statistic, freedom), f"chi-square {statistic:.1f} at {freedom} degrees of freedom"


def test_a_verification_that_favours_drafts_is_caught(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Accept the first child of the root whatever was sampled: the classic mistake."""

    def gullible(tree: DraftTree | None, sampled: list[int], max_tokens: int, stop_ids: frozenset[int]) -> Walk:
        if tree is not None and max_tokens > 1:
            sampled[0] = tree.tokens[0]
        return walk(tree, sampled, max_tokens, stop_ids)

    monkeypatch.setattr(engine_module, "walk", gullible)
    statistic, freedom = chi_square(sample(folder), exact(folder))
    assert far_too_large(statistic, freedom), f"chi-square {statistic:.1f} at {freedom} degrees of freedom"


def test_reusing_one_positions_noise_for_its_children_is_caught(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Sample a node's successor with its parent's noise: tokens then depend on each other."""
    real = runner_module.sample_rows

    def careless(works: Sequence[Work]) -> list[SampleRow]:
        rows = real(works)
        return [replace(row, position=len(PROMPT)) for row in rows]

    monkeypatch.setattr(runner_module, "sample_rows", careless)
    statistic, freedom = chi_square(sample(folder), exact(folder))
    assert far_too_large(statistic, freedom), f"chi-square {statistic:.1f} at {freedom} degrees of freedom"
