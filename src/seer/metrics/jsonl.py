# SPDX-License-Identifier: Apache-2.0
"""The event log: a file of JSON lines, a header and then one event each.

    {"kind":"header","schema":1,"metadata":{"scheduler":"seer", ...}}
    {"kind":"queued","t_s":0.0,"request":0,"group":0,"index":0,"num_prompt_tokens":512}
    ...

The header says which version of the schema the lines follow and what was run; `seer.sim.replay` runs it again
from that. Lines are appended in the order in which things happened.
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial
from pathlib import Path
from types import TracebackType
from typing import Any

import msgspec

from seer.errors import InputError
from seer.machine.given_files import open_given
from seer.machine.json_files import UNREADABLE
from seer.machine.whole_files import create_anew
from seer.metrics.events import Event

SCHEMA = 1
"""Raised whenever a reader of the old schema would misread the new."""

MAX_LINE_BYTES = 64 << 20
"""Of a line that is read: headers hold the turns of every request, events a few numbers."""
_FLUSH_EVENTS = 4096
"""Events per write: a simulation emits millions, and a system call for each would dominate."""


class LogHeader(msgspec.Struct, frozen=True, tag_field="kind", tag="header"):
    """The first line: what the other lines are."""

    schema: int
    metadata: dict[str, Any]
    """What was run: plain JSON values, chosen by the writer."""


class EventLog:
    """An event sink that writes a file; a context manager, so that the last lines are never lost."""

    def __init__(self, path: Path, metadata: dict[str, Any]) -> None:
        self._encoder = msgspec.json.Encoder()
        self._pending: list[Event] = []
        self._file = create_anew(path)
        self._file.write(self._encoder.encode_lines([LogHeader(SCHEMA, metadata)]))

    def __call__(self, event: Event) -> None:
        """Add one event; lines are written in batches and on exit."""
        self._pending.append(event)
        if len(self._pending) == _FLUSH_EVENTS:
            self._flush()

    def __enter__(self) -> EventLog:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        with self._file:  # closed also when the disk is full
            self._flush()

    def _flush(self) -> None:
        self._file.write(self._encoder.encode_lines(self._pending))
        self._pending.clear()


def read_header(path: Path) -> LogHeader:
    """The header of an event log; any other file is refused."""
    try:
        with open_given(path) as file:
            header = msgspec.json.decode(file.readline(MAX_LINE_BYTES), type=LogHeader)
    except FileNotFoundError:
        raise InputError(f"no event log {path}", hint="`seer simulate ... --out DIR` writes them") from None
    except (OSError, *UNREADABLE) as error:
        raise InputError(f"{path} is not an event log: {error}", hint="its first line is a header") from error
    if header.schema != SCHEMA:
        raise InputError(
            f"{path} follows schema {header.schema}, this version reads {SCHEMA}",
            hint="read it with the version of Seer that wrote it",
        )
    return header


def read_events(path: Path, *, allow_cut: bool = False) -> Iterator[Event]:
    """The events of a log, in order; a damaged line is refused with its number.

    `allow_cut` leaves out a last line without its end: a killed run leaves one.
    """
    read_header(path)
    decoder = msgspec.json.Decoder(Event)
    with open_given(path) as file:
        file.readline(MAX_LINE_BYTES)
        for number, line in enumerate(iter(partial(file.readline, MAX_LINE_BYTES), b""), start=2):
            if allow_cut and not line.endswith(b"\n"):
                return
            try:
                yield decoder.decode(line)
            except UNREADABLE as error:
                raise InputError(f"{path}, line {number}: {error}", hint="was it cut off?") from error
