# SPDX-License-Identifier: Apache-2.0
"""One response of an HTTP request: its tokens so far, its text, how it ended, and what of it was sent.

Tokens are kept here only while they are needed: for a stream; otherwise the whole response is taken when it has ended.
A stream reads what is new of a choice at once, so a slow reader gets fewer and longer pieces, and what waits for it is
never more than the response itself.

Instances end responses, at stop tokens and at stop strings. As in vLLM, the token that ended a response is one of its
tokens, and what ended it is not in its text, unless `keep_stop`.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial

from seer.engine.stop_strings import StopStrings
from seer.engine.text_codec import ChatCodec
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
    keep_stop: bool = False
    skip_special: bool = True
    """Whether the text is without that of special tokens."""


@dataclass(frozen=True, slots=True)
class Piece:
    """What is new of a choice since the last piece."""

    ids: Sequence[int]
    logprobs: Sequence[float]
    """Empty where its request does not ask for them."""
    text: str
    start: int
    """Tokens of earlier pieces."""
    start_char: int


class Choice:
    """One response of a request."""

    def __init__(self, index: int, ask: Ask, codec: ChatCodec | None, *, has_text: bool) -> None:
        self.index = index
        self.ask = ask
        self.ids: list[int] = []
        self.logprobs: list[float] = []
        self.finish_reason: str | None = None
        self.stop_reason: str | int | None = None
        self.weights_version: int | None = None
        self.error: Refusal | None = None
        self._codec = codec
        self._text: TextStream | None = None
        if codec is not None and has_text:
            decode = partial(codec.decode, skip_special=ask.skip_special)
            self._text = TextStream(decode, ask.sampling.stop)
        self._num_decoded = 0
        self._num_sent = 0
        self._num_sent_chars = 0
        self.is_end_sent = False

    @property
    def text(self) -> str:
        """All text so far."""
        return self._text.text if self._text is not None else ""

    def add(self, span: TokenSpan, *, ends_with_stop_token: bool = False) -> None:
        """Take tokens; the text of a stop token waits for the end, where it is left out or not."""
        self.ids.extend(span.ids)
        self.logprobs.extend(span.logprobs)
        if self._text is not None:
            self._decode_until(self._text, len(self.ids) - ends_with_stop_token)

    def end(self, response: Response) -> None:
        """The response has ended."""
        self.weights_version = response.weights_version
        if response.finish_reason is FinishReason.FAILED:
            self.error = Refusal(500, f"the response failed: {response.error}")
            return
        self.add(TokenSpan(response.token_ids[len(self.ids) :], response.logprobs[len(self.ids) :], 0))
        if self._text is not None:
            self._decode_until(self._text, len(self.ids))
            self._text.flush()
        self.finish_reason = _FINISH[response.finish_reason]
        if response.finish_reason is FinishReason.STOP and self.ids:
            self._note_stop()

    def abort(self) -> None:
        """The response was cancelled before it began."""
        self.finish_reason = _FINISH[FinishReason.CANCELLED]

    def _decode_until(self, text: TextStream, num: int) -> None:
        if num > self._num_decoded:
            text.add(self.ids[self._num_decoded : num])
            self._num_decoded = num

    def _note_stop(self) -> None:
        """Say what ended the response, and leave it out of the text."""
        last, sampling = self.ids[-1], self.ask.sampling
        if last not in sampling.stop_token_ids and sampling.stop and self._codec is not None:
            shown = StopStrings(partial(self._codec.decode, skip_special=self.ask.skip_special), sampling.stop)
            found = shown.completed(self.ids)
            if found is not None:
                self.stop_reason = found.string
                if self._text is not None:
                    kept = len(found.string) if self.ask.keep_stop else 0
                    self._text.drop(found.num_chars - kept)
                return
            # For instances special tokens are text.
            found = StopStrings(partial(self._codec.decode, skip_special=False), sampling.stop).completed(self.ids)
            if found is not None:
                self.stop_reason = found.string
                return
        self.stop_reason = last if last in sampling.stop_token_ids else None
        if self._text is not None and not self.ask.keep_stop:
            self._text.drop_last_token()

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
