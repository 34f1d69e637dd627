# SPDX-License-Identifier: Apache-2.0
"""Where the text of a turn has a stop string: at which of its tokens the turn ends.

The turn ends with the token that completes the string, and that token is kept whole: nothing is tokenized again.

Invariants
  1. Where a turn ends is a function of its own tokens: it does not depend on how many of them come at once, nor on
     where chunks end.
  2. A string that is complete before `min_tokens` tokens of the response ends nothing.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple

Decode = Callable[[Sequence[int]], str]
INCOMPLETE = "\N{REPLACEMENT CHARACTER}"
"""What tokenizers decode half a character to."""


class Completed(NamedTuple):
    """A stop string that a token completes."""

    string: str
    num_chars: int
    """From its first character to the end of the token's text."""


class StopStrings:
    """Looks for stop strings in the newest tokens of a turn."""

    SLACK_TOKENS = 4
    """Decoded before the tokens that can hold a string: those may start in the middle of a character."""

    def __init__(self, decode: Decode, stop: Sequence[str]) -> None:
        self._decode = decode
        self._stop = tuple(stop)
        self.num_tokens_back = max(len(one.encode()) for one in stop) + self.SLACK_TOKENS
        """Tokens before the new ones that are looked at; each has a byte at least."""

    def find(self, turn: Sequence[int], num_new: int, num_free: int = 0) -> int | None:
        """How many of the last `num_new` tokens are in the turn, if it ends with one of them.

        The first `num_free` of these end nothing: `min_tokens` is not reached with them.
        """
        before = len(turn) - num_new
        text = self._decode(turn[max(0, before - self.num_tokens_back) :])
        if not any(one in text for one in self._stop):
            return None
        return next((new for new in range(num_free + 1, num_new + 1) if self.completed(turn[: before + new])), None)

    def completed(self, turn: Sequence[int]) -> Completed | None:
        """The string that the last token completes; of several the one that ends first."""
        tail = turn[-self.num_tokens_back :]
        known, text = self._decode(tail[:-1]).rstrip(INCOMPLETE), self._decode(tail)
        found = [(text.find(one, max(0, len(known) - len(one) + 1)), one) for one in self._stop]
        hits = [(at + len(one), at, one) for at, one in found if at >= 0]
        if not hits:
            return None
        _, start, string = min(hits, key=lambda hit: hit[:2])
        return Completed(string, len(text) - start)
