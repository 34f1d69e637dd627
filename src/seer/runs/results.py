# SPDX-License-Identifier: Apache-2.0
"""Results as a run hands them out and as its file keeps them.

The rollout loop makes each `Response` when its request ends; `complete` adds the text and puts its times on the run's
clock. A results file has one `Response` per line, field for field.

A results file is written beside its place, as NAME.partial, and moved there when the run ends, so the file at its place
is always whole, and an older one stays until then.
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Iterator
from pathlib import Path
from types import TracebackType
from typing import Self

import msgspec

from seer.engine.text_codec import TextCodec
from seer.errors import InputError, SeerError
from seer.machine.given_files import RECORD_BYTES, read_given
from seer.machine.json_files import UNREADABLE
from seer.runs.run_lock import lock_file, unlock_file
from seer.types import Response, Turn


def complete(response: Response, codec: TextCodec | None, *, began_s: float) -> None:
    """Add the text, and count times from the beginning of the run."""
    if codec is not None:
        response.text = codec.decode(response.token_ids)
    response.queued_s = round(response.queued_s - began_s, 6)
    response.started_s = None if response.started_s is None else round(response.started_s - began_s, 6)
    response.finished_s = round(response.finished_s - began_s, 6)
    response.turns = [_since(turn, began_s) for turn in response.turns]


def _since(turn: Turn, began_s: float) -> Turn:
    """The same turn, with times from the beginning of the run."""
    began, ended = (None if time_s is None else round(time_s - began_s, 6) for time_s in (turn.began_s, turn.ended_s))
    return Turn(turn.kind, turn.start, turn.end, began, ended)


class ResultsFile:
    """A results file in the making. Only one run writes to a place at a time."""

    def __init__(self, path: Path, *, replace: bool) -> None:
        """Open NAME.partial beside `path`; `replace` says whether a file may be there when the run ends."""
        self.path = path.resolve()  # a link stays, and the file that it names is replaced
        self.partial = self.path.with_name(f"{self.path.name}.partial")
        self._may_replace = replace
        self._encoder = msgspec.json.Encoder()
        try:
            self.path.parent.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise InputError(f"{self.path.parent} cannot be made: {error.strerror}", hint="--out FILE.jsonl") from None
        self._lock = lock_file(self.partial, what=path, mode=0o666)
        self._file = self._lock.descriptor
        os.ftruncate(self._file, 0)  # what a killed run left

    def write(self, responses: Iterable[Response]) -> None:
        """Append responses, one line each."""
        left = memoryview(b"".join(self._encoder.encode(response) + b"\n" for response in responses))
        try:
            while left:
                left = left[os.write(self._file, left) :]
        except OSError as error:
            raise SeerError(
                f"{self.partial} cannot be written: {error.strerror}", hint="--resume goes on where the journal ends"
            ) from None

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """Move the file to its place; not if it is empty, and after an error only if no older file is there."""
        try:
            is_taken = os.path.lexists(self.path)
            if not os.fstat(self._file).st_size or (is_taken and kind is not None):
                self.partial.unlink(missing_ok=True)
            elif is_taken and not self._may_replace:
                raise SeerError(f"{self.path} was made during the run", hint=f"the results are in {self.partial}")
            else:
                os.fsync(self._file)
                self.partial.replace(self.path)
        finally:
            unlock_file(self._lock)


def read_responses(path: Path) -> Iterator[Response]:
    """The responses of a results file."""
    decoder = msgspec.json.Decoder(Response)
    try:
        lines = read_given(path, limit_bytes=RECORD_BYTES).splitlines()
    except OSError as error:
        raise InputError(f"{path} cannot be read: {error.strerror}") from None
    for number, line in enumerate(lines, 1):
        try:
            yield decoder.decode(line)
        except UNREADABLE as error:
            raise InputError(
                f"{path}, line {number}: {error}", hint="is this a results file of `seer rollout`?"
            ) from None
