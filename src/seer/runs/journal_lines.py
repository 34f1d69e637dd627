# SPDX-License-Identifier: Apache-2.0
"""The lines of a journal, their checksums, and what a whole journal says.

    {"type":"seer-journal","version":3,"settings":"...","weights":"...","checksum":"0a1b2c3d"}
    {"type":"chunk","group":0,"index":3,"offset":128,"spans":[...],"finish_reason":null,"checksum":"4e5f6071"}

A line's checksum is the CRC-32 of the line up to its checksum, continued from the checksum of the line before. So a
line that was changed, removed, doubled or moved shows in its own checksum or in the next one.

Invariants
  1. `read_journal` accepts what `Checksums.sealed` wrote, line by line from the first, and nothing else. Only a last
     line without its end is left out: a kill can leave one, and it is the only damage that is expected.
  2. The tokens of a request are its lines' in order: each begins at the offset where the last one ended, and none
     comes after the line that ends the response.
"""

from __future__ import annotations

import zlib
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated

import msgspec

from seer.errors import InputError
from seer.machine.given_files import RECORD_BYTES, open_given, read_given
from seer.machine.json_files import UNREADABLE
from seer.types import FinishReason, TokenSpan

VERSION = 3
"""Raised when the format changes; a journal of another version is refused."""

Count = Annotated[int, msgspec.Meta(ge=0)]
_HEADER_BYTES = 1 << 20
_HINT = "the journal cannot be trusted: start a new run, or put the undamaged file back"
_FIELD = b',"checksum":"%08x"}'
_FIELD_BYTES = len(_FIELD % 0)


class JournalHeader(msgspec.Struct, frozen=True, tag="seer-journal"):
    """The first line: which run this is."""

    version: int
    settings: str
    weights: str


class JournalSpan(msgspec.Struct, frozen=True):
    """A `TokenSpan` as the file keeps it."""

    ids: list[Count]
    logprobs: list[float] | None
    """None if the sampling does not ask for any."""
    weights_version: int
    raw_logprobs: list[float] | None = None
    is_given: bool = False

    def __post_init__(self) -> None:
        """Every token that was sampled has its log-probabilities, or none has."""
        expected = 0 if self.is_given or self.logprobs is None else len(self.ids)
        for values in (self.logprobs, self.raw_logprobs):
            if values is not None and len(values) != expected:
                raise ValueError(f"{len(self.ids)} tokens and {len(values)} log-probabilities")

    def as_span(self) -> TokenSpan:
        """As the rollout loop has it."""
        return TokenSpan(self.ids, self.logprobs or (), self.weights_version, self.raw_logprobs, self.is_given)


class JournalLine(msgspec.Struct, frozen=True, tag="chunk"):
    """Tokens of one request from an offset on, and how it ended if it has."""

    group: Count
    index: Count
    offset: Count
    spans: list[JournalSpan]
    finish_reason: FinishReason | None = None
    has_handed_over: bool = False
    """Whether its environment is to be asked next."""
    reward: float | None = None
    """That its environment gave."""

    def __post_init__(self) -> None:
        """Requests that were cancelled or failed go on in the resumed run, so they have no end here."""
        if self.finish_reason is not None and not self.finish_reason.is_complete:
            raise ValueError(f"finish_reason {self.finish_reason.value!r} in a journal")


class Checksums:
    """Seals lines and checks sealed ones, from the first line of a file to the last."""

    def __init__(self) -> None:
        self._last = 0

    def sealed(self, line: JournalHeader | JournalLine) -> bytes:
        """The next line of the file."""
        body = msgspec.json.encode(line)[:-1]
        self._last = zlib.crc32(body, self._last)
        return body + _FIELD % self._last + b"\n"

    def accepts(self, line: bytes) -> bool:
        """Whether this is the next line of the file."""
        self._last = zlib.crc32(line[:-_FIELD_BYTES], self._last)
        return line[-_FIELD_BYTES:] == _FIELD % self._last


@dataclass(slots=True)
class PastRequest:
    """What a journal holds of one request."""

    spans: list[TokenSpan] = field(default_factory=list)
    num_tokens: int = 0
    num_generated: int = 0
    finish_reason: FinishReason | None = None
    has_handed_over: bool = False
    reward: float | None = None

    def add(self, line: JournalLine) -> None:
        """Take the next line of it into account; a ValueError says why it cannot be one."""
        if self.finish_reason is not None:
            raise ValueError(f"response {line.index} of prompt {line.group} had ended")
        if line.offset != self.num_tokens:
            raise ValueError(
                f"response {line.index} of prompt {line.group} goes on at token {line.offset}, "
                f"and has {self.num_tokens}"
            )
        self.spans.extend(span.as_span() for span in line.spans)
        self.num_tokens += sum(len(span.ids) for span in line.spans)
        self.num_generated += sum(len(span.ids) for span in line.spans if not span.is_given)
        self.finish_reason, self.has_handed_over = line.finish_reason, line.has_handed_over
        self.reward = line.reward


@dataclass(frozen=True, slots=True)
class JournalContent:
    """What a journal says."""

    header: JournalHeader
    past: dict[tuple[int, int], PastRequest]
    checksums: Checksums
    """Ready to seal the next line."""
    torn_at: int | None = None
    """Bytes before a part of a line at the end, if there is one."""


def read_journal(path: Path) -> JournalContent:
    """Read a journal; one that is damaged anywhere but at its torn end is refused."""
    try:
        content = read_given(path, limit_bytes=RECORD_BYTES)
    except OSError as error:
        raise InputError(f"{path} cannot be read: {error.strerror}", hint="is there a run to resume?") from None
    num_bytes = content.rfind(b"\n") + 1  # a line that was cut off has no end
    lines = content[:num_bytes].split(b"\n")[:-1]
    header, checksums = _header(path, lines[0] if lines else b""), Checksums()
    decoder = msgspec.json.Decoder(JournalLine)
    past: dict[tuple[int, int], PastRequest] = {}
    for number, line in enumerate(lines, 1):
        if not checksums.accepts(line):
            raise InputError(
                f"{path}, line {number}: its checksum does not match; "
                "the line was changed, or one before it was removed, doubled or moved",
                hint=_HINT,
            )
        if number == 1:
            continue
        try:
            entry = decoder.decode(line)
            past.setdefault((entry.group, entry.index), PastRequest()).add(entry)
        except (ValueError, *UNREADABLE) as error:
            raise InputError(f"{path}, line {number}: {error}", hint=_HINT) from None
    return JournalContent(header, past, checksums, num_bytes if num_bytes < len(content) else None)


def read_header(path: Path) -> JournalHeader:
    """The first line of a journal."""
    try:
        with open_given(path) as file:
            return _header(path, file.readline(_HEADER_BYTES))
    except OSError as error:
        raise InputError(f"{path} cannot be read: {error.strerror}") from None


def _header(path: Path, line: bytes) -> JournalHeader:
    try:
        header = msgspec.json.decode(line, type=JournalHeader)
    except (ValueError, *UNREADABLE):
        version = _version(line)
        if version is None or version == VERSION:
            raise InputError(f"{path} is not a journal: its first line is no header", hint=_HINT) from None
    else:
        version = header.version
        if version == VERSION:
            return header
    raise InputError(
        f"{path} follows version {version} of the format, this Seer reads {VERSION}",
        hint="resume it with the version of Seer that wrote it",
    )


class _AnyHeader(msgspec.Struct, tag="seer-journal"):
    version: int


def _version(line: bytes) -> int | None:
    """The version of a header that may have other fields."""
    try:
        return msgspec.json.decode(line, type=_AnyHeader).version
    except (ValueError, *UNREADABLE):
        return None
