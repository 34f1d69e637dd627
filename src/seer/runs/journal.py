# SPDX-License-Identifier: Apache-2.0
"""A run's tokens on disk, chunk by chunk and lease by lease, so that a killed run can continue.

JSON lines, appended as chunks end or their leases are extended: first the identity of the run, then one line each time,
with the tokens that were not in the file yet and the offset at which they begin (journal_lines.py). A kill can cut off
the last line at most; that one is dropped, and nothing else ever is.

Invariants
  1. A line that is in the file is never changed; a resumed run appends to the same file.
  2. The tokens of a request, read in order, are a prefix of its response.
  3. A journal is used only by a run with the same identity (identity.py): settings that decide tokens, and weights.
     The scheduler, the number of instances and everything else that does not change tokens may differ.
  4. A journal has one writer at a time: it is locked (run_lock.py) before it is read or written, until it is closed.
  5. The end of a response is in the file once, also if the run was resumed after it.
  6. A resumed journal is as it was until the first new line is written, so a resume that is refused changes nothing.
"""

from __future__ import annotations

import contextlib
import os
from pathlib import Path
from typing import Self

from seer.buffer import Request, RequestState
from seer.errors import InputError, SeerError
from seer.machine.whole_files import write_whole
from seer.runs.identity import RunIdentity
from seer.runs.journal_lines import (
    VERSION,
    Checksums,
    JournalContent,
    JournalHeader,
    JournalLine,
    JournalSpan,
    read_journal,
)
from seer.runs.run_lock import RunLock
from seer.types import Restored, TokenSpan


class Journal:
    """The journal of one run, open for appending."""

    def __init__(self, path: Path, content: JournalContent, lock: RunLock) -> None:
        self.path = path
        self._lock = lock
        self._past = content.past
        self._num_spans = {key: len(one.spans) for key, one in content.past.items()}
        self._num_tokens = {key: one.num_tokens for key, one in content.past.items()}
        self._ended = {key for key, one in content.past.items() if one.finish_reason is not None}
        self._checksums = content.checksums
        self._torn_at = content.torn_at
        self._has_failed = False
        try:
            self._file = os.open(path, os.O_WRONLY | os.O_APPEND | os.O_NOFOLLOW | os.O_CLOEXEC)
        except OSError as error:
            raise InputError(
                f"{path} cannot be written: {error.strerror}", hint="is it a link, or read-only?"
            ) from None

    @classmethod
    def create(cls, path: Path, identity: RunIdentity) -> Self:
        """Start a journal; an older one at this path is replaced."""
        path.parent.mkdir(parents=True, exist_ok=True)
        checksums = Checksums()
        header = JournalHeader(VERSION, identity.settings, identity.weights)
        line = checksums.sealed(header)
        with contextlib.ExitStack() as undo:
            lock = undo.enter_context(_locked(path))
            write_whole(path, line)
            journal = cls(path, JournalContent(header, {}, checksums), lock)
            undo.pop_all()
        return journal

    @classmethod
    def resume(cls, path: Path, identity: RunIdentity) -> Self:
        """Continue a journal; one of another run, or with damage, is refused."""
        if not path.parent.is_dir():
            raise InputError(f"{path.parent} is not a folder", hint="is there a run to resume?")
        with contextlib.ExitStack() as undo:
            lock = undo.enter_context(_locked(path))
            content = read_journal(path)
            identity.refuse_other(content.header, path)
            identity.refuse_impossible(content.past, path)
            journal = cls(path, content, lock)
            undo.pop_all()
        return journal

    def restored(self) -> dict[tuple[int, int], Restored]:
        """What the interrupted run had generated, by group and index."""
        return {
            key: Restored(tuple(one.spans), one.finish_reason, one.has_handed_over, one.reward)
            for key, one in self._past.items()
        }

    def record(self, request: Request) -> None:
        """Write what is not in the file yet; called when a chunk ends or is extended, and when its tool answers."""
        key = (request.group.id, request.index)
        fresh = request.spans[self._num_spans.get(key, 0) :]
        reason = request.finish_reason
        finish_reason = reason if reason is not None and reason.is_complete else None
        is_at_tool = request.state is RequestState.AT_TOOL
        has_news = fresh or finish_reason is not None or is_at_tool
        if self._has_failed or not has_news or key in self._ended:  # a restored response ends once more for its run
            return
        offset = self._num_tokens.get(key, 0)
        line = JournalLine(
            *key,
            offset,
            [_as_line(span) for span in fresh],
            finish_reason,
            is_at_tool,
            request.response.reward if request.response is not None else None,
        )
        self._append(self._checksums.sealed(line))
        if finish_reason is not None:
            self._ended.add(key)
        self._num_spans[key] = len(request.spans)
        self._num_tokens[key] = offset + sum(len(span.ids) for span in fresh)

    def close(self) -> None:
        """Close the file; every line is already written."""
        os.close(self._file)
        self._lock.release()

    def _append(self, line: bytes) -> None:
        """Write a whole line. After a failure the file may end in a part of it, so nothing more is written."""
        try:
            if self._torn_at is not None:
                os.ftruncate(self._file, self._torn_at)
                self._torn_at = None
            left = memoryview(line)
            while left:
                left = left[os.write(self._file, left) :]
        except OSError as error:
            self._has_failed = True
            raise SeerError(
                f"{self.path} cannot be written: {error.strerror}", hint="--resume goes on where the journal ends"
            ) from None


def _locked(path: Path) -> RunLock:
    return RunLock(path.with_name(f"{path.name}.lock"), what=path)


def _as_line(span: TokenSpan) -> JournalSpan:
    raw = None if span.raw_logprobs is None else list(span.raw_logprobs)
    logprobs = list(span.logprobs) if span.logprobs or span.is_given else None
    return JournalSpan(list(span.ids), logprobs, span.weights_version, raw, span.is_given)
