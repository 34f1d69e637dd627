# SPDX-License-Identifier: Apache-2.0
"""A run's finished chunks on disk, so that a killed run can continue.

JSON lines, appended as chunks end: first the identity of the run, then one line per chunk with the tokens that were not
in the file yet. A line is written in one call, so a kill can cut off the last one at most; a last line that was cut off
is dropped.

Invariants
  1. A line that is in the file is never changed; a resumed run appends to the same file.
  2. The tokens of a request, read in order, are a prefix of its response.
  3. A journal is used only by a run with the same identity: model, prompts, sampling and seed. The scheduler,
     the number of instances and everything else that does not change tokens may differ.
  4. A journal has one writer at a time: it is locked (run_lock.py) before it is read or written, until it is closed.
"""

from __future__ import annotations

import contextlib
import hashlib
import os
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Self

import msgspec

from seer.buffer import Request
from seer.errors import InputError
from seer.runs.prompts import EncodedPrompt
from seer.runs.run_lock import RunLock
from seer.types import FinishReason, Restored, TokenSpan

VERSION = 1
"""Raised when the format changes; a journal of another version is refused."""


class JournalHeader(msgspec.Struct, frozen=True, tag="seer-journal"):
    """The first line."""

    version: int
    identity: str


class JournalLine(msgspec.Struct, frozen=True, tag="chunk"):
    """Tokens of one request, and how it ended if it has."""

    group: int
    index: int
    spans: list[TokenSpan]
    finish_reason: FinishReason | None = None


@dataclass(slots=True)
class _Past:
    spans: list[TokenSpan]
    finish_reason: FinishReason | None = None


def run_identity(model: str, prompts: Sequence[EncodedPrompt], seed: int) -> str:
    """A name that two runs share only if they ask for the same tokens: model, prompts, sampling and seed."""
    digest = hashlib.blake2b(digest_size=16)
    digest.update(f"{model}|{seed}".encode())
    for prompt in prompts:
        digest.update(f"|{prompt.n}|{prompt.sampling}|{prompt.prompt.seed}|{prompt.token_ids}".encode())
    return digest.hexdigest()


class Journal:
    """The journal of one run, open for appending."""

    def __init__(self, path: Path, past: dict[tuple[int, int], _Past], lock: RunLock) -> None:
        self.path = path
        self._lock = lock
        self._past = past
        self._num_written = {key: len(one.spans) for key, one in past.items()}
        self._encoder = msgspec.json.Encoder()
        self._file = os.open(path, os.O_WRONLY | os.O_APPEND | os.O_NOFOLLOW | os.O_CLOEXEC)

    @classmethod
    def create(cls, path: Path, identity: str) -> Self:
        """Start a journal; an older one at this path is replaced."""
        path.parent.mkdir(parents=True, exist_ok=True)
        with contextlib.ExitStack() as undo:
            lock = undo.enter_context(_locked(path))
            path.write_bytes(msgspec.json.encode(JournalHeader(VERSION, identity)) + b"\n")
            journal = cls(path, {}, lock)
            undo.pop_all()
        return journal

    @classmethod
    def resume(cls, path: Path, identity: str) -> Self:
        """Continue a journal; one of another run is refused."""
        if not path.parent.is_dir():
            raise InputError(f"{path.parent} is not a folder", hint="is there a run to resume?")
        with contextlib.ExitStack() as undo:
            lock = undo.enter_context(_locked(path))
            header, past, good_bytes = _read(path)
            if header.identity != identity:
                raise InputError(
                    f"{path} belongs to a run with another model, prompts, sampling or seed",
                    hint="give the same arguments as the run that was interrupted, or leave --resume out",
                )
            os.truncate(path, good_bytes)
            journal = cls(path, past, lock)
            undo.pop_all()
        return journal

    def restored(self) -> dict[tuple[int, int], Restored]:
        """What the interrupted run had generated, by group and index."""
        return {key: Restored(tuple(one.spans), one.finish_reason) for key, one in self._past.items()}

    def record(self, request: Request) -> None:
        """Write the tokens of a request that are not in the file yet; called when a chunk of it ends."""
        key = (request.group.id, request.index)
        done = self._num_written.get(key, 0)
        fresh = request.spans[done:]
        reason = request.finish_reason
        finish_reason = reason if reason is not None and reason.is_complete else None
        if not fresh and finish_reason is None:
            return
        line = self._encoder.encode(JournalLine(*key, fresh, finish_reason)) + b"\n"
        written = os.write(self._file, line)
        assert written == len(line), f"{written} of {len(line)} bytes written to {self.path}"
        self._num_written[key] = len(request.spans)

    def close(self) -> None:
        """Close the file; every line is already written."""
        os.close(self._file)
        self._lock.release()


def _locked(path: Path) -> RunLock:
    return RunLock(path.with_name(f"{path.name}.lock"), what=path)


def _read(path: Path) -> tuple[JournalHeader, dict[tuple[int, int], _Past], int]:
    try:
        content = path.read_bytes()
    except OSError as error:
        raise InputError(f"{path} cannot be read: {error.strerror}", hint="is there a run to resume?") from None
    good_bytes = content.rfind(b"\n") + 1  # a line that was cut off has no end
    lines = content[:good_bytes].splitlines()
    try:
        header = msgspec.json.decode(lines[0], type=JournalHeader) if lines else None
    except msgspec.DecodeError:
        header = None
    if header is None or header.version != VERSION:
        raise InputError(f"{path} is not a journal of this version of seer")
    decoder = msgspec.json.Decoder(JournalLine)
    past: dict[tuple[int, int], _Past] = {}
    for number, text in enumerate(lines[1:], 2):
        try:
            line = decoder.decode(text)
        except msgspec.DecodeError as error:
            raise InputError(f"{path}, line {number}: {error}", hint="the file is damaged; start a new run") from None
        one = past.setdefault((line.group, line.index), _Past([]))
        one.spans.extend(line.spans)
        one.finish_reason = line.finish_reason
    return header, past, good_bytes
