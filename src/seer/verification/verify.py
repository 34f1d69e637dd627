# SPDX-License-Identifier: Apache-2.0
"""Verify responses: were they sampled from these weights with these seeds?

A response is scored again by a plain forward pass: one sequence, all positions at once, fp32, no KV cache, no batch, no
drafts, none of the engine's kernels. At every position that gives the log-probability that should have been reported
and, since the sampling noise of a position depends on the request's seed only, the token that should have been sampled.

A token that differs although it was within `NEAR_TIE` of the best candidate counts as a near tie, not as a mismatch:
another order of summation may decide such a sample the other way.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch

from seer.engine.local.model_config import ModelConfig, read_config
from seer.engine.local.rotary import RotaryTable
from seer.engine.local.sampling import NEAR_TIE, SampleRow, gumbel, processed
from seer.engine.local.weights import open_weights
from seer.types import Response, Sampling

GAP_LIMITS = {"float32": 2e-3, "bfloat16": 0.25, "float16": 0.05}
"""Largest difference of a log-probability that rounding explains, by the type the engine computed in."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Verification:
    """What verifying some of a run's responses found."""

    num_responses: int
    num_tokens: int
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
        return tokens_agree and max(self.max_logprob_gap, self.max_raw_logprob_gap) <= self.gap_limit


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


def verify(model: PlainModel, responses: Iterable[ResponseToVerify], *, dtype: str = "float32") -> Verification:
    """Score every response again and count what differs. `dtype` is what the engine computed in."""
    num_responses = num_tokens = num_mismatches = num_near_ties = 0
    gap = raw_gap = 0.0
    for asked in responses:
        response = asked.response
        if not response.token_ids:
            continue
        ids = [*asked.prompt_token_ids, *response.token_ids]
        start = len(asked.prompt_token_ids) - 1
        logits = model.logits(ids[:-1], start)
        stops = _stop_ids(model.config, asked)
        num_responses += 1
        for index, (token, row) in enumerate(zip(response.token_ids, logits, strict=True)):
            cut = stops if index < asked.sampling.min_tokens else frozenset()
            sample = SampleRow(asked.sampling, response.seed, start + 1 + index, cut)
            ready = processed(row, sample)
            greedy = asked.sampling.temperature == 0
            noisy = ready if greedy else ready + gumbel(sample.seed, sample.position, len(row))
            best = noisy.max()
            if noisy[token] != best:
                is_tie = float(best - noisy[token]) < NEAR_TIE
                num_near_ties += is_tie
                num_mismatches += not is_tie
            expected = 0.0 if greedy else float(ready[token] - ready.logsumexp(0))
            gap = max(gap, abs(expected - response.logprobs[index]))
            if response.raw_logprobs is not None:
                raw = float(row[token] - row.logsumexp(0))
                raw_gap = max(raw_gap, abs(raw - response.raw_logprobs[index]))
        num_tokens += len(response.token_ids)
    return Verification(
        num_responses=num_responses,
        num_tokens=num_tokens,
        num_mismatches=num_mismatches,
        num_near_ties=num_near_ties,
        max_logprob_gap=gap,
        max_raw_logprob_gap=raw_gap,
        gap_limit=GAP_LIMITS[dtype],
        tokens_are_promised=dtype == "float32",
    )


def add_up(parts: Sequence[Verification]) -> Verification:
    """The sum of several verifications against the same weights."""
    assert parts, "nothing was verified"
    return Verification(
        num_responses=sum(part.num_responses for part in parts),
        num_tokens=sum(part.num_tokens for part in parts),
        num_mismatches=sum(part.num_mismatches for part in parts),
        num_near_ties=sum(part.num_near_ties for part in parts),
        max_logprob_gap=max(part.max_logprob_gap for part in parts),
        max_raw_logprob_gap=max(part.max_raw_logprob_gap for part in parts),
        gap_limit=parts[0].gap_limit,
        tokens_are_promised=parts[0].tokens_are_promised,
    )


def engine_dtype(dtype: str, device: str) -> str:
    """The type that the local engine computes in under these settings."""
    if dtype != "auto":
        return dtype
    return "float32" if device == "cpu" else "bfloat16"


def _stop_ids(config: ModelConfig, asked: ResponseToVerify) -> frozenset[int]:
    if asked.ends_ignored:
        return frozenset()
    ends = () if asked.sampling.ignore_eos else config.eos_token_ids
    return frozenset({*ends, *asked.sampling.stop_token_ids})
