# SPDX-License-Identifier: Apache-2.0
"""Text of tokens as they come, of which nothing has to be taken back.

Invariants
  1. The pieces together are the text of all tokens; half a character waits for its other half.
  2. Text that is or may become a stop string is held back until tokens after it have come, or the end: where a response
     ends is the instances' to say.
"""

from __future__ import annotations

from collections.abc import Sequence

from seer.engine.stop_strings import INCOMPLETE, Decode

_SLACK_TOKENS = 8
"""Decoded before the last token to know its text: those before it may be parts of a character."""


class TextStream:
    """Decodes the tokens of one response."""

    def __init__(self, decode: Decode, stop: Sequence[str] = ()) -> None:
        """`stop`: strings that may end the response."""
        self._decode = decode
        self._stop = tuple(stop)
        self._ids: list[int] = []
        self._start = 0  # tokens before it are decoded for good
        self._shown = 0  # tokens before it have given their text
        self._text = ""
        self._num_old_chars = 0  # before the newest tokens
        self._is_whole = False

    @property
    def text(self) -> str:
        """All text so far."""
        return self._text

    def add(self, ids: Sequence[int]) -> None:
        """Decode more tokens."""
        self._ids.extend(ids)
        self._num_old_chars = len(self._text)
        before = self._decode(self._ids[self._start : self._shown])
        whole = self._decode(self._ids[self._start :])
        # A token's text may depend on the ones before it, so those are decoded with it and taken away again.
        if len(whole) > len(before) and not whole.endswith(INCOMPLETE):
            self._start, self._shown = self._shown, len(self._ids)
            self._text += whole[len(before) :]

    def flush(self) -> None:
        """Nothing more comes: half a character is shown as it is."""
        before = self._decode(self._ids[self._start : self._shown])
        self._text += self._decode(self._ids[self._start :])[len(before) :]
        self._start = self._shown = len(self._ids)
        self._is_whole = True

    def drop(self, num_chars: int) -> None:
        """Leave out the last characters; after `flush`."""
        self._text = self._text[: len(self._text) - num_chars]

    def drop_last_token(self) -> None:
        """Leave out the text of the last token; after `flush`."""
        tail = self._ids[-_SLACK_TOKENS:]
        self.drop(max(0, len(self._decode(tail)) - len(self._decode(tail[:-1]))))

    @property
    def num_safe(self) -> int:
        """Characters that no stop string can take back."""
        if self._is_whole:
            return len(self._text)
        found = (self._text.find(one, max(0, self._num_old_chars - len(one) + 1)) for one in self._stop)
        return min([start_of_partial(self._text, self._stop), *(at for at in found if at >= 0)])


def start_of_partial(text: str, strings: Sequence[str]) -> int:
    """Where the end of a text begins that may become one of these strings; the text's length if there is none."""
    longest = max(map(len, strings), default=0)
    for held in range(min(longest - 1, len(text)), 0, -1):
        if any(one.startswith(text[-held:]) for one in strings):
            return len(text) - held
    return len(text)
