# SPDX-License-Identifier: Apache-2.0
"""Noise, processing and sampling."""

from __future__ import annotations

import math
from typing import Any

import pytest

torch = pytest.importorskip("torch")

from seer.engine.admission import refuse_impossible
from seer.engine.local import cpu_ops
from seer.engine.local.sampling import SampleRow, gumbel, processed, sample
from seer.errors import NoProbability
from seer.types import Sampling


def a_row(seed: int = 1, position: int = 0, cut: frozenset[int] = frozenset(), **settings: float) -> SampleRow:
    return SampleRow(Sampling(max_tokens=10, **settings), seed, position, cut)  # type: ignore[arg-type]


LOGITS = torch.tensor([2.0, 1.0, 0.5, -1.0, -3.0])


def kept(**settings: Any) -> list[int]:
    found: list[int] = torch.isfinite(processed(LOGITS, a_row(**settings))).nonzero().flatten().tolist()
    return found


def test_noise_is_a_gumbel_variable() -> None:
    noise = gumbel(7, 3, 200_000)
    assert abs(float(noise.mean()) - 0.57722) < 0.01
    assert abs(float(noise.var()) - math.pi**2 / 6) < 0.03
    # P(g > x) = 1 - exp(-exp(-x)), far into the tail
    for x in (3.0, 6.0, 8.0):
        expected = 200_000 * -math.expm1(-math.exp(-x))
        assert abs(float((noise > x).sum()) - expected) < 6 * expected**0.5


def test_noise_of_other_seeds_positions_and_tokens_is_unrelated() -> None:
    rows = [gumbel(seed, position, 20_000) for seed in (0, 1, 2**63) for position in (0, 1, 2)]
    correlation = torch.corrcoef(torch.stack(rows)) - torch.eye(len(rows))
    assert float(correlation.abs().max()) < 6 / 20_000**0.5
    same_token = torch.stack([gumbel(5, position, 8) for position in range(4000)])
    assert float((torch.corrcoef(same_token.T) - torch.eye(8)).abs().max()) < 6 / 4000**0.5


@pytest.mark.skipif(not cpu_ops.available(), reason="the native kernels are not built")
def test_native_noise_is_the_same_function() -> None:
    out = torch.empty(50_000)
    for seed, position in ((0, 0), (123456789, 4095), (2**64 - 1, 7)):
        cpu_ops.kernels.gumbel(seed, position, out.data_ptr(), len(out))
        assert torch.allclose(out, gumbel(seed, position, len(out)), atol=3e-6, rtol=3e-6)


def test_processing_cuts_what_it_should() -> None:
    assert kept() == [0, 1, 2, 3, 4]
    assert kept(top_k=2) == [0, 1]
    assert kept(top_p=0.5) == [0]
    assert kept(top_p=0.8) == [0, 1]
    assert kept(min_p=0.3) == [0, 1]
    assert kept(min_p=1.0) == [0]
    assert kept(top_k=3, top_p=0.99) == [0, 1, 2]
    assert kept(top_p=1e-9) == [0]


def test_of_equal_tokens_the_first_are_kept_up_to_top_p_and_top_k_keeps_all() -> None:
    assert torch.isfinite(processed(torch.zeros(4), a_row(top_p=0.5))).tolist() == [True, True, False, False]
    assert torch.isfinite(processed(torch.zeros(4), a_row(top_k=2))).all()


def test_temperature_scales_before_the_cuts() -> None:
    assert kept(temperature=0.1, min_p=0.01) == [0]
    assert kept(temperature=10.0, min_p=0.5) == [0, 1, 2, 3, 4]


def test_cut_tokens_are_never_sampled_even_greedily() -> None:
    logits = LOGITS.expand(2, -1).contiguous()
    sampled = sample(logits, [a_row(temperature=0.0, cut=frozenset({0})), a_row(top_k=1, cut=frozenset({0, 1}))])
    assert sampled.tokens == [1, 2]


def test_greedy_has_log_probability_zero_and_the_models_own_raw_one() -> None:
    sampled = sample(LOGITS[None].contiguous(), [a_row(temperature=0.0)])
    assert sampled.logprobs == [0.0]
    assert sampled.raw_logprobs[0] == pytest.approx(float(LOGITS.log_softmax(0)[0]), abs=1e-6)


def test_log_probabilities_are_those_of_the_processed_and_the_raw_distribution() -> None:
    rows = [a_row(seed, temperature=0.7, top_k=3) for seed in range(50)]
    sampled = sample(LOGITS.expand(50, -1).contiguous(), rows)
    ready = processed(LOGITS, rows[0]).log_softmax(0)
    for token, logprob, raw in zip(sampled.tokens, sampled.logprobs, sampled.raw_logprobs, strict=True):
        assert logprob == pytest.approx(float(ready[token]), abs=1e-5)
        assert raw == pytest.approx(float(LOGITS.log_softmax(0)[token]), abs=1e-5)


def test_native_and_plain_sampling_agree(monkeypatch: pytest.MonkeyPatch) -> None:
    generator = torch.Generator().manual_seed(0)
    logits = 3 * torch.randn(200, 1003, generator=generator)
    rows = [a_row(seed, seed * 3, temperature=[0.0, 1.0, 0.6][seed % 3]) for seed in range(200)]
    native = sample(logits, rows)
    monkeypatch.setattr(cpu_ops, "available", lambda: False)
    plain = sample(logits, rows)
    assert native.tokens == plain.tokens
    assert native.logprobs == pytest.approx(plain.logprobs, abs=1e-5)
    assert native.raw_logprobs == pytest.approx(plain.raw_logprobs, abs=1e-5)


def test_near_ties_are_counted() -> None:
    logits = torch.tensor([[1.0, 1.0 + 1e-6, 0.0], [5.0, 1.0, 0.0]])
    assert sample(logits, [a_row(temperature=0.0)] * 2).num_near_ties == 1


NAN, INF = math.nan, math.inf
HOPELESS = {
    "all NaN": [NAN] * 40,
    "one NaN": [NAN if i == 33 else float(i % 7) for i in range(40)],
    "one NaN at the end": [*(float(i % 7) for i in range(40)), NAN],
    "one infinite": [INF if i == 5 else float(i % 7) for i in range(40)],
    "all minus infinite": [-INF] * 40,
    "all excluded": [1.0] * 40,
}


@pytest.mark.parametrize("temperature", [0.0, 0.7, 1.0])
@pytest.mark.parametrize("case", HOPELESS)
@pytest.mark.parametrize("kernels", ["native", "torch"])
def test_logits_without_probabilities_show_in_the_sample(
    kernels: str, case: str, temperature: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    if kernels == "torch":
        monkeypatch.setattr(cpu_ops, "available", lambda: False)
    logits = HOPELESS[case]
    cut = frozenset(range(len(logits))) if case == "all excluded" else frozenset()
    samples = sample(torch.tensor([logits]), [a_row(temperature=temperature, cut=cut)])
    with pytest.raises(NoProbability, match="request 3, position 11: "):
        refuse_impossible(3, 11, samples.tokens, samples.logprobs, samples.raw_logprobs, vocab_size=len(logits))


def test_logits_of_which_some_are_minus_infinite_are_sampled_as_ever() -> None:
    samples = sample(torch.tensor([[-INF, 1.0, -INF, 2.0]]), [a_row()])
    refuse_impossible(3, 11, samples.tokens, samples.logprobs, samples.raw_logprobs, vocab_size=4)
