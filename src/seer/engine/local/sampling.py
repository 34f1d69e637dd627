# SPDX-License-Identifier: Apache-2.0
"""Sample tokens from logits, with noise that depends only on (seed, position).

Gumbel-max: the sampled token is the argmax of processed logit plus noise(seed, position, token). The noise of a
position does not depend on the computation, so the token at a position depends only on the tokens before it. It is the
same in any batch, chunk, instance and draft. Therefore tree_walk.py can accept a draft by comparing tokens.

Processing, in this order: stop tokens are excluded before `min_tokens`, then temperature, min-p, top-k, top-p (each
applied to what the ones before left). At temperature 0 the sampled token has probability 1 and log-probability 0. The
raw log-probability is always the model's own.

Invariants
  1. noise(seed, position, token) is the same function in C++, PyTorch and Triton: integer arithmetic, then
     two logs.
  2. A token that processing excluded is never sampled.
  3. Where no token has a probability (a NaN or an infinity among the logits, or all of them excluded), the token is -1
     or its log-probability is not finite. The engine checks both when it appends the token.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray

from seer.engine.local import cpu_ops
from seer.types import Sampling

MASK32 = 0xFFFFFFFF
MASK64 = 0xFFFFFFFFFFFFFFFF
"""Python's integers have no width: these cut them to 32 and 64 bits."""
NEAR_TIE = 1e-3
"""A sample whose runner-up is closer than this could change under another order of summation."""


@dataclass(frozen=True, slots=True)
class SampleRow:
    """Sampling parameters of one row of logits."""

    sampling: Sampling
    seed: int
    position: int
    """Absolute position of the token that is sampled."""
    cut: frozenset[int] = frozenset()
    """Tokens that must not be sampled yet."""


@dataclass(frozen=True, slots=True)
class Samples:
    """The sampled tokens, one per row."""

    tokens: list[int]
    logprobs: list[float]
    raw_logprobs: list[float]
    num_near_ties: int = 0


def unpack(sampled: NDArray[np.float32]) -> Samples:
    """Samples of a device: per row the token's bits, its log-probability, the raw one, its margin over the next."""
    return Samples(
        np.ascontiguousarray(sampled[:, 0]).view(np.int32).tolist(),
        sampled[:, 1].tolist(),
        sampled[:, 2].tolist(),
        int((sampled[:, 3] < NEAR_TIE).sum()),
    )


def sample(logits: torch.Tensor, rows: Sequence[SampleRow]) -> Samples:
    """Sample one token per row of fp32 logits."""
    if logits.device.type == "cpu" and cpu_ops.available():
        return _sample_native(logits, rows)
    return _sample_torch(logits, rows)


def processed(logits: torch.Tensor, row: SampleRow) -> torch.Tensor:
    """One row's logits after everything but the noise; the row itself when nothing applies."""
    sampling = row.sampling
    if row.cut:
        logits = logits.clone()
        logits[torch.tensor(sorted(row.cut), device=logits.device)] = float("-inf")
    if sampling.temperature == 0:
        return logits
    if sampling.temperature != 1:
        logits = logits / sampling.temperature
    if sampling.min_p > 0:
        floor = logits.max() + torch.log(torch.tensor(sampling.min_p))
        logits = logits.masked_fill(logits < floor, float("-inf"))
    if sampling.top_k is not None and sampling.top_k < len(logits):
        least = logits.topk(sampling.top_k).values[-1]
        logits = logits.masked_fill(logits < least, float("-inf"))
    if sampling.top_p < 1:
        ordered, order = logits.sort(descending=True, stable=True)
        before = ordered.softmax(0).cumsum(0) - ordered.softmax(0)
        # A token stays while those above it sum to less than top_p. Nothing is above the first, so it always stays.
        logits = logits.index_fill(0, order[before >= sampling.top_p], float("-inf"))
    return logits


def noise_key(seed: int, position: int) -> int:
    """64 bits derived from (seed, position)."""
    return mix64(mix64(seed & MASK64) ^ position)


def gumbel(seed: int, position: int, vocab_size: int, device: torch.device | None = None) -> torch.Tensor:
    """The noise of every token at one position, in plain PyTorch."""
    key = noise_key(seed, position)
    token = torch.arange(vocab_size, dtype=torch.int64, device=device)
    bits = _mix32((_mix32(token ^ (key & MASK32)) + (key >> 32)) & MASK32)
    high, low = (bits >> 16).float(), (bits & 0xFFFF).float()
    # Steps of 2^-32 near 0, where the largest noise comes from, so that rare tokens keep their probability.
    uniform = (high * 2.0**-16 + (low + 0.5) * 2.0**-32).clamp_max(0.99999994)
    return -torch.log(-torch.log1p(-uniform))


def _mix32(x: torch.Tensor) -> torch.Tensor:
    x = x ^ (x >> 16)
    x = (x * 0x7FEB352D) & MASK32
    x = x ^ (x >> 15)
    x = (x * 0x846CA68B) & MASK32
    return x ^ (x >> 16)


def mix64(x: int) -> int:
    """Spread 64 bits over 64 bits (splitmix64)."""
    x = (x + 0x9E3779B97F4A7C15) & MASK64
    x = ((x ^ (x >> 30)) * 0xBF58476D1CE4E5B9) & MASK64
    x = ((x ^ (x >> 27)) * 0x94D049BB133111EB) & MASK64
    return x ^ (x >> 31)


def _sample_native(logits: torch.Tensor, rows: Sequence[SampleRow]) -> Samples:
    logits = logits.contiguous()
    vocab = logits.shape[1]
    tokens, logprobs, raw_logprobs, near = [], [], [], 0
    for raw, row in zip(logits.unbind(), rows, strict=True):
        ready = processed(raw, row)
        token, logprob, raw_logprob, margin = cpu_ops.kernels.sample(
            raw.data_ptr(),
            ready.data_ptr(),
            vocab,
            row.seed & MASK64,
            row.position,
            row.sampling.temperature == 0,
        )
        tokens.append(token)
        logprobs.append(logprob)
        raw_logprobs.append(raw_logprob)
        near += margin < NEAR_TIE
    return Samples(tokens, logprobs, raw_logprobs, near)


def _sample_torch(logits: torch.Tensor, rows: Sequence[SampleRow]) -> Samples:
    tokens, logprobs, raw_logprobs, near = [], [], [], 0
    for raw, row in zip(logits.unbind(), rows, strict=True):
        ready = processed(raw, row)
        greedy = row.sampling.temperature == 0
        noisy = ready if greedy else ready + gumbel(row.seed, row.position, len(raw), raw.device)
        best = noisy.topk(2)
        token = int(best.indices[0]) if greedy else int(noisy.argmax())
        tokens.append(token)
        # A greedy sample has probability 1, unless every token is excluded.
        logprobs.append(float(ready[token] - (ready[token] if greedy else ready.logsumexp(0))))
        raw_logprobs.append(float(raw[token] - raw.logsumexp(0)))
        near += float(best.values[0] - best.values[1]) < NEAR_TIE
    return Samples(tokens, logprobs, raw_logprobs, near)
