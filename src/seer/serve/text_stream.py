# SPDX-License-Identifier: Apache-2.0
"""Text of tokens as they come, and where a stop string ends it.

Invariants
  1. The pieces together are the text of all tokens; half a character waits for its other half.
  2. Text that may yet become part of a stop string is held back, so that no piece has to be taken back.
  3. With a stop string, the tokens are those up to the one that completed it, as in vLLM: a function of the seed
     alone, however many tokens had been generated when it was found.
"""

from __future__ import annotations

from collections.abc import Sequence

from seer.engine.text_codec import TextCodec

_INCOMPLETE = "\N{REPLACEMENT CHARACTER}"
"""What tokenizers decode half a character to."""


class TextStream:
    """Decodes the tokens of one response."""

    def __init__(self, codec: TextCodec, stop: Sequence[str] = (), *, keep_stop: bool = False) -> None:
        self._codec = codec
        self._stop = tuple(stop)
        self._keep_stop = keep_stop
        self._longest = max((len(one) for one in self._stop), default=0)
        self._ids: list[int] = []
        self._start = 0  # tokens before it are decoded for good
        self._shown = 0  # tokens before it have given their text
        self._text = ""
        self.stopped_by: str | None = None
        """The stop string that was found."""

    @property
    def text(self) -> str:
        """All text so far, up to a stop string."""
        return self._text

    def add(self, ids: Sequence[int]) -> int:
        """Decode more tokens; returns how many of them belong to the response (fewer if a stop string was found)."""
        if not self._stop:
            self._ids.extend(ids)
            self._text += self._new_text()
            return len(ids)
        for number, token in enumerate(ids, 1):
            self._ids.append(token)
            if self._found(self._new_text()):
                return number
        return len(ids)

    def flush(self) -> None:
        """Nothing more comes: half a character is shown as it is."""
        if self.stopped_by is None:
            before = self._codec.decode(self._ids[self._start : self._shown])
            self._text += self._codec.decode(self._ids[self._start :])[len(before) :]
            self._start = self._shown = len(self._ids)
            self._longest = 0

    @property
    def num_safe(self) -> int:
        """Characters that no stop string can take back."""
        if self.stopped_by is not None or not self._longest:
            return len(self._text)
        for held in range(min(self._longest - 1, len(self._text)), 0, -1):
            if any(one.startswith(self._text[-held:]) for one in self._stop):
                return len(self._text) - held
        return len(self._text)

    def _found(self, piece: str) -> bool:
        """Add a piece of text; whether it completes a stop string."""
        before, self._text = len(self._text), self._text + piece
        searched_from = max(0, before - self._longest + 1)
        hits = [(at, one) for one in self._stop if (at := self._text.find(one, searched_from)) >= 0]
        if not hits:
            return False
        at, self.stopped_by = min(hits, key=lambda hit: (hit[0] + len(hit[1]), hit[0]))
        self._text = self._text[: at + len(self.stopped_by) if self._keep_stop else at]
        return True

    def _new_text(self) -> str:
        """Text of the tokens since the last call. A token's text may depend on the ones before it, so those are decoded
        with it and taken away again.
        """
        before = self._codec.decode(self._ids[self._start : self._shown])
        whole = self._codec.decode(self._ids[self._start :])
        if len(whole) <= len(before) or whole.endswith(_INCOMPLETE):
            return ""
        self._start, self._shown = self._shown, len(self._ids)
        return whole[len(before) :]
