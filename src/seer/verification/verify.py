# SPDX-License-Identifier: Apache-2.0
"""Verify responses: were they sampled from these weights with these seeds?

A response is scored again by a plain forward pass: one sequence, all positions at once, fp32, no KV cache, no batch, no
drafts, none of the engine's kernels. At every position that gives the log-probability that should have been reported
and, where the sampling noise of a position depends on the request's seed only (noise.py), the token that should have
been sampled.

Of a response with turns only the generated tokens are scored, each after the whole conversation before it, given tokens
included. A given token has no log-probability: one that is reported counts as a gap.

A response without log-probabilities is verified by its tokens alone. Where those cannot be repeated either, nothing
says that they are right: such tokens are counted as unverified, and a verification with one is never clean.

A token that differs although it was within `NEAR_TIE` of the best candidate counts as a near tie, not as a mismatch:
another order of summation may decide such a sample the other way.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch

from seer.engine.local.model_config import ModelConfig, read_config
from seer.engine.local.rotary import RotaryTable
from seer.engine.local.sampling import NEAR_TIE, SampleRow, processed
from seer.engine.local.weights import open_weights
from seer.types import Response, Sampling
from seer.verification.noise import Scoring, noise_at

GAP_LIMITS = {"float32": 2e-3, "bfloat16": 0.25, "float16": 0.05}
"""Largest difference of a log-probability that rounding explains, by the type the engine computed in."""
SCORING = Scoring()
"""The embedded engine on a CPU."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Verification:
    """What verifying some of a run's responses found."""

    num_responses: int
    num_tokens: int
    num_compared: int
    """Tokens whose sampling noise is known, and greedy ones; of the others only the log-probability is verified."""
    num_without_logprob: int
    """Tokens of responses without log-probabilities; only the tokens themselves are verified."""
    num_unverified: int
    """Of these, tokens that cannot be repeated, or are not promised: nothing of them is verified."""
    num_mismatches: int
    """Tokens that the seeds and the weights do not give; near ties are not counted."""
    num_near_ties: int
    """Tokens that differ from the best candidate by less than rounding can decide."""
    max_logprob_gap: float
    max_raw_logprob_gap: float
    gap_limit: float
    tokens_are_promised: bool
    """Whether the engine promises these exact tokens (fp32), or only their distribution."""

    @property
    def is_clean(self) -> bool:
        """Whether the responses are what the weights and seeds give, within the limits."""
        tokens_agree = self.num_mismatches == 0 or not self.tokens_are_promised
        return (
            tokens_agree
            and not self.num_unverified
            and max(self.max_logprob_gap, self.max_raw_logprob_gap) <= self.gap_limit
        )


class PlainModel:
    """The decoder again, written for clarity and not for speed."""

    def __init__(self, folder: Path, weights: Path | None = None) -> None:
        """The model of a folder; `weights` replaces the folder's own."""
        # One thread: where other cores are busy, threads that wait for each other take longer than one.
        torch.set_num_threads(1)
        self.config: ModelConfig = read_config(folder)
        stored = open_weights(folder if weights is None else weights)
        self._weights = {name: stored[name].to(torch.float32) for name in stored}
        self._rotary = RotaryTable(self.config, torch.device("cpu"))

    @torch.inference_mode()
    def logits(self, token_ids: Sequence[int], start: int) -> torch.Tensor:
        """Logits after each token from position `start` on, [tokens, vocabulary]."""
        config, w = self.config, self._weights
        hidden = w["model.embed_tokens.weight"][torch.tensor(list(token_ids))]
        for index in range(config.num_layers):
            at = f"model.layers.{index}."
            hidden = hidden + self._attention(at, self._norm(hidden, at + "input_layernorm.weight"))
            normed = self._norm(hidden, at + "post_attention_layernorm.weight")
            gate = torch.nn.functional.silu(normed @ w[at + "mlp.gate_proj.weight"].T)
            hidden = hidden + (gate * (normed @ w[at + "mlp.up_proj.weight"].T)) @ w[at + "mlp.down_proj.weight"].T
        head = w["model.embed_tokens.weight" if config.tied_head else "lm_head.weight"]
        return self._norm(hidden[start:], "model.norm.weight") @ head.T

    def _attention(self, at: str, hidden: torch.Tensor) -> torch.Tensor:
        config = self.config
        length = len(hidden)
        q = self._heads(at + "self_attn.q_proj", hidden, config.num_heads)
        k = self._heads(at + "self_attn.k_proj", hidden, config.num_kv_heads)
        v = self._heads(at + "self_attn.v_proj", hidden, config.num_kv_heads)
        if config.qk_norm:
            q, k = (
                self._norm(q, at + "self_attn.q_norm.weight"),
                self._norm(k, at + "self_attn.k_norm.weight"),
            )
        cosine, sine = self._rotary.rows(torch.arange(length))
        q, k = _rotate(q, cosine, sine), _rotate(k, cosine, sine)
        repeats = config.num_heads // config.num_kv_heads
        k, v = k.repeat_interleave(repeats, 1), v.repeat_interleave(repeats, 1)
        scores = torch.einsum("qhd,khd->hqk", q, k) * config.head_dim**-0.5
        future = torch.ones(length, length, dtype=torch.bool).triu(1)
        mixed = torch.einsum("hqk,khd->qhd", scores.masked_fill(future, float("-inf")).softmax(-1), v)
        return mixed.reshape(length, -1) @ self._weights[at + "self_attn.o_proj.weight"].T

    def _heads(self, name: str, hidden: torch.Tensor, num_heads: int) -> torch.Tensor:
        projected = hidden @ self._weights[name + ".weight"].T
        bias = self._weights.get(name + ".bias")
        projected = projected if bias is None else projected + bias
        return projected.view(len(hidden), num_heads, self.config.head_dim)

    def _norm(self, x: torch.Tensor, name: str) -> torch.Tensor:
        scale = torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + self.config.rms_norm_eps)
        return x * scale * self._weights[name]


def _rotate(x: torch.Tensor, cosine: torch.Tensor, sine: torch.Tensor) -> torch.Tensor:
    first, second = x.chunk(2, -1)
    c, s = cosine[:, None, :], sine[:, None, :]
    return torch.cat([first * c - second * s, second * c + first * s], -1)


@dataclass(frozen=True, slots=True)
class ResponseToVerify:
    """A response with the prompt and the sampling it was generated with."""

    prompt_token_ids: Sequence[int]
    sampling: Sampling
    response: Response
    ends_ignored: bool = False
    """The run forced lengths, so the model's end tokens did not count."""


def verify(model: PlainModel, responses: Iterable[ResponseToVerify], scoring: Scoring = SCORING) -> Verification:
    """Score every response again and count what differs; `scoring` says how the engine sampled."""
    is_promised = scoring.dtype == "float32"
    count = _Count()
    for asked in responses:
        if asked.response.token_ids:
            _score(model, asked, scoring, count)
    return Verification(
        num_responses=count.responses,
        num_tokens=count.tokens,
        num_compared=count.compared,
        num_without_logprob=count.without_logprob,
        num_unverified=count.unrepeatable if is_promised else count.without_logprob,
        num_mismatches=count.mismatches,
        num_near_ties=count.near_ties,
        max_logprob_gap=count.gap,
        max_raw_logprob_gap=count.raw_gap,
        gap_limit=GAP_LIMITS[scoring.dtype],
        tokens_are_promised=is_promised,
    )


@dataclass(slots=True)
class _Count:
    responses: int = 0
    tokens: int = 0
    compared: int = 0
    without_logprob: int = 0
    unrepeatable: int = 0
    """Of these, tokens whose sampling noise is not known."""
    mismatches: int = 0
    near_ties: int = 0
    gap: float = 0.0
    raw_gap: float = 0.0


def _score(model: PlainModel, asked: ResponseToVerify, scoring: Scoring, count: _Count) -> None:
    response, sampling = asked.response, asked.sampling
    start = len(asked.prompt_token_ids)
    logits = model.logits([*asked.prompt_token_ids, *response.token_ids][:-1], start - 1)
    raw_logprobs = response.raw_logprobs or [0.0] * len(response.token_ids)
    stops, num_generated, num_before = _stop_ids(model.config, asked), 0, count.compared
    count.responses += 1
    for index, (token, row) in enumerate(zip(response.token_ids, logits, strict=True)):
        expected = raw = 0.0
        if response.loss_mask is None or response.loss_mask[index]:
            cut = stops if num_generated < sampling.min_tokens else frozenset()
            sample = SampleRow(sampling, response.seed, start + index, cut)
            expected = _scored(row, sample, token, scoring, count)
            raw = float(row[token] - row.logsumexp(0)) if response.raw_logprobs is not None else 0.0
            num_generated += 1
        if sampling.logprobs:
            count.gap = max(count.gap, _gap(expected, response.logprobs[index]))
        count.raw_gap = max(count.raw_gap, _gap(raw, raw_logprobs[index]))
    count.tokens += num_generated
    if not sampling.logprobs:
        count.without_logprob += num_generated
        count.unrepeatable += num_generated - (count.compared - num_before)


def _gap(expected: float, reported: float) -> float:
    """Between two log-probabilities; infinite if one is no number: `max` would pass over a NaN."""
    gap = abs(expected - reported)
    return math.inf if math.isnan(gap) else gap


def _scored(row: torch.Tensor, sample: SampleRow, token: int, scoring: Scoring, count: _Count) -> float:
    """Compare a token with the one that the seed gives; returns the log-probability that it should have."""
    ready = processed(row, sample)
    greedy = sample.sampling.temperature == 0
    noise = torch.zeros(()) if greedy else noise_at(scoring.noise, sample.seed, sample.position, len(row))
    if noise is not None:
        noisy = ready + noise
        lead = float(noisy.max() - noisy[token])
        count.compared += 1
        count.near_ties += 0 < lead < NEAR_TIE
        count.mismatches += not lead < NEAR_TIE
    return 0.0 if greedy else float(ready[token] - ready.logsumexp(0))


def add_up(parts: Sequence[Verification]) -> Verification:
    """The sum of several verifications against the same weights."""
    assert parts, "nothing was verified"
    return Verification(
        num_responses=sum(part.num_responses for part in parts),
        num_tokens=sum(part.num_tokens for part in parts),
        num_compared=sum(part.num_compared for part in parts),
        num_without_logprob=sum(part.num_without_logprob for part in parts),
        num_unverified=sum(part.num_unverified for part in parts),
        num_mismatches=sum(part.num_mismatches for part in parts),
        num_near_ties=sum(part.num_near_ties for part in parts),
        max_logprob_gap=max(part.max_logprob_gap for part in parts),
        max_raw_logprob_gap=max(part.max_raw_logprob_gap for part in parts),
        gap_limit=parts[0].gap_limit,
        tokens_are_promised=parts[0].tokens_are_promised,
    )


def _stop_ids(config: ModelConfig, asked: ResponseToVerify) -> frozenset[int]:
    return frozenset() if asked.ends_ignored else asked.sampling.end_tokens(config.eos_token_ids)
