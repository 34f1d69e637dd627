# SPDX-License-Identifier: Apache-2.0
"""Measured step costs of an engine: the file that `seer profile` writes and instances start from.

Points lie on a grid of (requests, tokens per request, context tokens). Between them the cost is interpolated linearly.
Beyond the last it is extrapolated from the last two, never downwards; below the first it is constant. Does not import
PyTorch.
"""

from __future__ import annotations

import json
from bisect import bisect_left
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

import msgspec

from seer.errors import InputError
from seer.machine.json_files import UNREADABLE, read_object
from seer.machine.whole_files import write_whole
from seer.ranges import Count, CountOrZero, Seconds, SecondsOrZero


@dataclass(frozen=True, slots=True)
class ProfilePoint:
    """One measured shape of a step."""

    num_requests: Count
    tokens_per_request: Count
    """1 is plain decoding; 1 + n verifies n draft tokens."""
    context_tokens: CountOrZero
    step_s: Seconds
    """Median over `num_steps`."""
    num_steps: Count
    spread_s: SecondsOrZero
    """Between the first and third quartile."""


@dataclass(frozen=True, slots=True, kw_only=True)
class StepProfile:
    """Measured step costs of one model on one device. Implements `seer.speculation.throughput.StepCost`."""

    model: str
    device: str
    dtype: str
    points: tuple[ProfilePoint, ...]
    draft_s_per_request: SecondsOrZero = 0.0
    """Host time to draft for one request."""
    versions: str = ""
    """Of what it was measured with; a profile of other versions is not used."""

    def step_s(self, num_requests: int, tokens_per_request: float, context_tokens: float | None = None) -> float:
        """Seconds of one forward pass; the default context is the middle one of those measured."""
        contexts = sorted({point.context_tokens for point in self.points})
        at = contexts[len(contexts) // 2] if context_tokens is None else context_tokens
        by_context = []
        for context in contexts:
            here = [point for point in self.points if point.context_tokens == context]
            batches = sorted({point.num_requests for point in here})
            by_batch = [
                _line(
                    *zip(
                        *sorted((p.tokens_per_request, p.step_s) for p in here if p.num_requests == batch),
                        strict=True,
                    ),
                    at=tokens_per_request,
                )
                for batch in batches
            ]
            by_context.append(_line(batches, by_batch, at=num_requests))
        return _line(contexts, by_context, at=at)

    def draft_s(self, num_requests: int, depth: float) -> float:
        """Seconds to draft for a step."""
        return self.draft_s_per_request * num_requests if depth else 0.0

    def encode(self) -> bytes:
        """It as JSON."""
        return json.dumps(asdict(self), indent=1).encode() + b"\n"

    def save(self, path: Path) -> None:
        """Write it as JSON."""
        write_whole(path, self.encode())

    @classmethod
    def load(cls, path: Path) -> StepProfile:
        """Read what `save` wrote."""
        hint = "`seer profile MODEL` makes one"
        if not path.exists():
            raise InputError(f"there is no profile at {path}", hint=hint)
        try:
            profile = msgspec.convert(read_object(path, hint=hint), cls)
        except UNREADABLE as error:
            raise InputError(f"{path} is not a profile: {error}", hint=hint) from None
        if not profile.points:
            raise InputError(f"{path} is not a profile: it has no points", hint=hint)
        return profile


def _line(xs: Sequence[float], ys: Sequence[float], *, at: float) -> float:
    """Piecewise linear through (xs, ys), extrapolated above the last point, constant below the first."""
    if len(xs) == 1 or at <= xs[0]:
        return ys[0]
    upper = min(max(1, bisect_left(xs, at)), len(xs) - 1)
    x0, x1, y0, y1 = xs[upper - 1], xs[upper], ys[upper - 1], ys[upper]
    if at > x1:  # a falling line is noise, and far enough along it every step would be free
        y0 = min(y0, y1)
    return y1 + (y1 - y0) * (at - x1) / (x1 - x0)
