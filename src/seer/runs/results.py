"""Results as a run hands them out and as its file keeps them.

The rollout loop makes each `Response` when its request ends; `complete` adds the text and puts its times on the run's
clock. A results file has one `Response` per line, field for field.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from pathlib import Path

import msgspec

from seer.engine.text_codec import TextCodec
from seer.errors import InputError
from seer.types import Response


def complete(response: Response, codec: TextCodec | None, *, began_s: float) -> None:
    """Add the text, and count times from the beginning of the run."""
    if codec is not None:
        response.text = codec.decode(response.token_ids)
    response.queued_s = round(response.queued_s - began_s, 6)
    response.started_s = None if response.started_s is None else round(response.started_s - began_s, 6)
    response.finished_s = round(response.finished_s - began_s, 6)


def write_responses(path: Path, responses: Iterable[Response]) -> None:
    """Append responses to a results file, one line each."""
    encoder = msgspec.json.Encoder()
    with path.open("ab") as file:
        for response in responses:
            file.write(encoder.encode(response) + b"\n")


def read_responses(path: Path) -> Iterator[Response]:
    """The responses of a results file."""
    decoder = msgspec.json.Decoder(Response)
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
