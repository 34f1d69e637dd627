# SPDX-License-Identifier: Apache-2.0
"""verl's sampling parameters as ours, with the length limit that verl's own server would derive.

Invariant: a request samples exactly as verl's parameters say, or is refused by the parameter's name.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from seer.errors import ConfigError
from seer.types import Sampling

_TAKEN = (
    *("temperature", "top_p", "top_k", "min_p", "min_tokens", "stop_token_ids", "ignore_eos"),
    *("max_tokens", "max_new_tokens", "logprobs", "repetition_penalty"),
)


@dataclass(frozen=True, slots=True)
class Lengths:
    """verl's limits, in tokens."""

    prompt: int
    response: int

    def default_max_tokens(self, num_prompt_tokens: int) -> int:
        """What verl's server allows where a request does not say."""
        return min(self.response, self.prompt + self.response - num_prompt_tokens)


def sampling_of(params: Mapping[str, Any], num_prompt_tokens: int, lengths: Lengths, *, ignore_eos: bool) -> Sampling:
    """The sampling of one request."""
    refuse_unknown(params)
    limit = params.get("max_tokens", params.get("max_new_tokens"))
    if limit is None:
        limit = lengths.default_max_tokens(num_prompt_tokens)
    limit, top_k = max(1, int(limit)), params.get("top_k")
    return Sampling(
        max_tokens=limit,
        temperature=float(params.get("temperature", 1.0)),
        top_p=float(params.get("top_p", 1.0)),
        top_k=None if top_k in (None, -1, 0) else int(top_k),  # verl: -1 is off
        min_p=float(params.get("min_p", 0.0)),
        min_tokens=min(int(params.get("min_tokens", 0)), limit),
        stop_token_ids=tuple(int(token) for token in params.get("stop_token_ids") or ()),
        ignore_eos=bool(params.get("ignore_eos", ignore_eos)),
    )


def refuse_unknown(params: Mapping[str, Any]) -> None:
    """Refuse a parameter that would be ignored."""
    unknown = sorted(name for name, value in params.items() if name not in _TAKEN and value is not None)
    if unknown:
        raise ConfigError(
            f"sampling parameter {unknown[0]!r} is not supported with rollout.name=seer",
            hint=f"supported are {', '.join(_TAKEN)}",
        )
    if params.get("repetition_penalty", 1.0) != 1.0:
        raise ConfigError(
            f"repetition_penalty={params['repetition_penalty']} is not supported with rollout.name=seer", hint="use 1.0"
        )
