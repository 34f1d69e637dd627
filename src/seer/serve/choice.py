# SPDX-License-Identifier: Apache-2.0
"""One response of an HTTP request: its tokens so far, its text, how it ended, and what of it was sent.

Tokens are kept here only while they are needed: for a stream, or to look for a stop string; otherwise the whole
response is taken when it has ended. A stream reads what is new of a choice at once, so a slow reader gets fewer and
longer pieces, and what waits for it is never more than the response itself.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from seer.serve.refusals import Refusal
from seer.serve.text_stream import TextStream
from seer.types import FinishReason, Response, Sampling, TokenSpan

_FINISH = {FinishReason.STOP: "stop", FinishReason.LENGTH: "length", FinishReason.CANCELLED: "abort"}


@dataclass(frozen=True, slots=True, kw_only=True)
class Ask:
    """One prompt of a request."""

    token_ids: Sequence[int]
    n: int
    sampling: Sampling
    seed: int | None = None
    group: str | None = None
    stop: tuple[str, ...] = ()
    keep_stop: bool = False


@dataclass(frozen=True, slots=True)
class Piece:
    """What is new of a choice since the last piece."""

    ids: Sequence[int]
    logprobs: Sequence[float]
    text: str
    start: int
    """Tokens of earlier pieces."""
    start_char: int


class Choice:
    """One response of a request."""

    def __init__(self, index: int, ask: Ask, text: TextStream | None) -> None:
        self.index = index
        self.ask = ask
        self.ids: list[int] = []
        self.logprobs: list[float] = []
        self.finish_reason: str | None = None
        self.stop_reason: str | int | None = None
        self.weights_version: int | None = None
        self.error: Refusal | None = None
        self._text = text
        self._num_sent = 0
        self._num_sent_chars = 0
        self.is_end_sent = False

    @property
    def text(self) -> str:
        """All text so far."""
        return self._text.text if self._text is not None else ""

    def add(self, span: TokenSpan) -> bool:
        """Take tokens; whether a stop string has ended the response."""
        if self.stop_reason is not None:
            return False
        num = self._text.add(span.ids) if self._text is not None else len(span.ids)
        self.ids.extend(span.ids[:num])
        self.logprobs.extend(span.logprobs[:num])
        if self._text is None or self._text.stopped_by is None:
            return False
        self.finish_reason, self.stop_reason = "stop", self._text.stopped_by
        return True

    def end(self, response: Response) -> None:
        """The response has ended."""
        self.weights_version = response.weights_version
        if self.stop_reason is not None:
            return
        if response.finish_reason is FinishReason.FAILED:
            self.error = Refusal(500, f"the response failed: {response.error}")
            return
        rest = TokenSpan(response.token_ids[len(self.ids) :], response.logprobs[len(self.ids) :], 0)
        if self.add(rest):
            return
        if self._text is not None:
            self._text.flush()
        self.finish_reason = _FINISH[response.finish_reason]
        last = self.ids[-1] if self.ids else None
        if response.finish_reason is FinishReason.STOP and last in self.ask.sampling.stop_token_ids:
            self.stop_reason = last

    @property
    def has_news(self) -> bool:
        """Whether `take` would give something, or the end."""
        return self._num_sent < len(self.ids) or (self.finish_reason is not None and not self.is_end_sent)

    def take(self) -> Piece:
        """What is new since the last call."""
        start, start_char = self._num_sent, self._num_sent_chars
        num_chars = self._text.num_safe if self._text is not None else 0
        self._num_sent, self._num_sent_chars = len(self.ids), num_chars
        self.is_end_sent = self.finish_reason is not None
        return Piece(self.ids[start:], self.logprobs[start:], self.text[start_char:num_chars], start, start_char)
