"""What a rollout hands out: groups of responses, each with its text, tokens, log-probabilities and timing.

A `ResponseRecord` is also, field for field, one line of a results file. Times are seconds since the run
began.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from pathlib import Path

import msgspec

from seer.buffer import Request
from seer.engine.text_codec import TextCodec
from seer.errors import InputError
from seer.runs.prompts import EncodedPrompt
from seer.types import FinishReason


class ResponseRecord(msgspec.Struct, kw_only=True):
    """One response."""

    group: int
    """Position of its prompt in the run."""
    prompt_id: str
    index: int
    """Which of the group's responses it is, from 0."""
    text: str | None
    """None where the model has no tokenizer."""
    token_ids: list[int]
    logprobs: list[float]
    """Of each token under the distribution it was drawn from."""
    raw_logprobs: list[float] | None
    """Of each token under the model's own distribution, where the engine reports it."""
    finish_reason: FinishReason
    weights_version: int
    """Version of the weights that every token was sampled under."""
    seed: int
    num_prompt_tokens: int
    num_tokens: int
    queued_s: float
    started_s: float | None
    finished_s: float
    num_chunks: int
    num_migrations: int
    error: str | None = None
    reward: float | None = None
    reward_error: str | None = None
    """Why there is no reward, where one was asked for."""

    @property
    def is_complete(self) -> bool:
        """Whether it ended by itself: the model stopped, or the length limit was reached."""
        return self.finish_reason in (FinishReason.STOP, FinishReason.LENGTH)


class GroupRecord(msgspec.Struct, frozen=True, kw_only=True):
    """All responses to one prompt, every one of them ended."""

    group: int
    prompt_id: str
    prompt_token_ids: tuple[int, ...]
    responses: tuple[ResponseRecord, ...]

    @property
    def is_complete(self) -> bool:
        """Whether every response ended by itself."""
        return all(response.is_complete for response in self.responses)


def respond(
    request: Request, prompt: EncodedPrompt, codec: TextCodec | None, *, weights_version: int, seed: int, began_s: float
) -> ResponseRecord:
    """The record of a request that has ended."""
    assert request.finish_reason is not None, f"{request} has not ended"
    ids = [token for span in request.spans for token in span.ids]
    raw = [span.raw_logprobs for span in request.spans]
    return ResponseRecord(
        group=request.group.id,
        prompt_id=prompt.prompt.id,
        index=request.index,
        text=codec.decode(ids) if codec is not None else None,
        token_ids=ids,
        logprobs=[value for span in request.spans for value in span.logprobs],
        raw_logprobs=[value for values in raw for value in values or ()] if None not in raw else None,
        finish_reason=request.finish_reason,
        weights_version=weights_version,
        seed=seed,
        num_prompt_tokens=len(prompt.token_ids),
        num_tokens=request.num_generated,
        queued_s=round(request.queued_s - began_s, 6),
        started_s=None if request.started_s is None else round(request.started_s - began_s, 6),
        finished_s=round(request.finished_s - began_s, 6),
        num_chunks=request.num_chunks,
        num_migrations=request.num_migrations,
        error=request.error,
    )


def write_responses(path: Path, responses: Iterable[ResponseRecord]) -> None:
    """Append responses to a results file, one line each."""
    encoder = msgspec.json.Encoder()
    with path.open("ab") as file:
        for response in responses:
            file.write(encoder.encode(response) + b"\n")


def read_responses(path: Path) -> Iterator[ResponseRecord]:
    """The responses of a results file."""
    decoder = msgspec.json.Decoder(ResponseRecord)
    try:
        lines = path.read_bytes().splitlines()
    except OSError as error:
        raise InputError(f"{path} cannot be read: {error.strerror}") from None
    for number, line in enumerate(lines, 1):
        try:
            yield decoder.decode(line)
        except msgspec.DecodeError as error:
            raise InputError(
                f"{path}, line {number}: {error}", hint="is this a results file of `seer rollout`?"
            ) from None
