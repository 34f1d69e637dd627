# SPDX-License-Identifier: Apache-2.0
"""Where the tokens of a turn stop: at a stop token, or at the token that completes a stop string."""

from __future__ import annotations

from collections.abc import Collection, Sequence

from seer.engine.stop_strings import Decode, StopStrings
from seer.types import Sampling


class TurnEnds:
    """The ends that a sampling asks for."""

    def __init__(self, sampling: Sampling, eos_token_ids: Collection[int], decode: Decode | None) -> None:
        """`decode` gives special tokens as their text; without it strings end nothing."""
        self._tokens = sampling.end_tokens(eos_token_ids)
        self._strings = StopStrings(decode, sampling.stop) if decode is not None and sampling.stop else None
        self._min_tokens = sampling.min_tokens

    def first(self, turn: Sequence[int], num_before: int = 0) -> int | None:
        """Tokens of the turn up to its first end; None if it has none. `num_before` were generated in earlier turns."""
        by_token = next((number for number, token in enumerate(turn, 1) if token in self._tokens), None)
        num_free = max(0, self._min_tokens - num_before)
        by_string = self._strings.find(turn, len(turn), num_free) if self._strings is not None else None
        return min((end for end in (by_token, by_string) if end is not None), default=None)

    def is_early(self, turn: Sequence[int], num_before: int = 0) -> bool:
        """Whether the turn's last token is a stop token that could not be sampled yet."""
        return bool(turn) and turn[-1] in self._tokens and num_before + len(turn) <= self._min_tokens
