# SPDX-License-Identifier: Apache-2.0
"""Messages between draft clients and draft servers, and their bytes.

A frame is two bytes of protocol version, then one MessagePack value: an array whose first item names the message.
Tokens are little-endian int32. ZeroMQ authenticates and encrypts frames (curve_keys.py).

`decode` accepts only what `encode` can produce: anything else raises WireError, and no other error.
"""

from typing import Annotated

import msgspec
import numpy as np
from numpy.typing import NDArray

from seer.errors import DraftError
from seer.machine.json_files import UNREADABLE

VERSION = b"S2"
"""Changes with every change of a message: a peer of another version is refused instead of misread."""
MAX_MESSAGE_BYTES = 8 << 20
"""Largest frame either side accepts: eight times what a full answer or push carries in tokens."""

CONFLICT = -1
"""Pushed length: these tokens contradict the log; the client must give the stream another number."""
FULL = -2
"""Pushed length: no room, even after evicting all that may be evicted."""
STALE = -3
"""Pushed length: the server has moved on to newer weights."""

U64 = Annotated[int, msgspec.Meta(ge=0)]  # MessagePack itself stops at 64 bits
Count = Annotated[int, msgspec.Meta(ge=0, le=2**31 - 1)]


class WireError(DraftError):
    """A frame is not a message of this protocol."""


class Tail(msgspec.Struct, array_like=True, frozen=True):
    """Tokens of one stream from position `start` on."""

    group: U64
    request: U64
    start: Count
    tokens: bytes


class Known(msgspec.Struct, array_like=True, frozen=True):
    """What a client holds of one group: its streams and their lengths, as packed arrays."""

    group: U64
    version: U64
    """The group's version the client has seen completely, 0 for none."""
    requests: bytes
    lengths: bytes


class Wanted(msgspec.Struct, array_like=True, frozen=True):
    """The server lacks this stream from `start` on, and the client has it."""

    group: U64
    request: U64
    start: Count


class Push(msgspec.Struct, tag="push", array_like=True, frozen=True):
    """Append these tails to the logs of a weights version."""

    sequence: U64
    weights_version: U64
    tails: list[Tail]


class Fetch(msgspec.Struct, tag="fetch", array_like=True, frozen=True):
    """Send what the client lacks of these groups."""

    sequence: U64
    weights_version: U64
    known: list[Known]


class Register(msgspec.Struct, tag="register", array_like=True, frozen=True):
    """Keep these groups for `ttl_s` seconds after they were last used."""

    sequence: U64
    weights_version: U64
    groups: list[U64]
    ttl_s: Annotated[float, msgspec.Meta(gt=0, le=1e9)]


class Drop(msgspec.Struct, tag="drop", array_like=True, frozen=True):
    """Drop these finished groups."""

    sequence: U64
    weights_version: U64
    groups: list[U64]


class Ask(msgspec.Struct, tag="ask", array_like=True, frozen=True):
    """Send your counters."""

    sequence: U64


class Pushed(msgspec.Struct, tag="pushed", array_like=True, frozen=True):
    """Answer to Push: the length each stream now has, or CONFLICT, FULL, STALE."""

    sequence: U64
    server: U64
    lengths: list[int]


class Fetched(msgspec.Struct, tag="fetched", array_like=True, frozen=True):
    """Answer to Fetch: each group's version this completes, the missing tails, what the server lacks."""

    sequence: U64
    server: U64
    versions: list[U64]
    tails: list[Tail]
    wanted: list[Wanted]
    more: bool
    """The answer was cut at its limit: fetch again."""


class Done(msgspec.Struct, tag="done", array_like=True, frozen=True):
    """Answer to Register and Drop."""

    sequence: U64
    server: U64


class Status(msgspec.Struct, tag="status", array_like=True, frozen=True):
    """Answer to Ask."""

    sequence: U64
    server: U64
    groups: int
    streams: int
    tokens: int
    bytes: int


class Refused(msgspec.Struct, tag="refused", array_like=True, frozen=True):
    """The server could not read the message."""

    sequence: U64
    server: U64
    reason: str


Request = Push | Fetch | Register | Drop | Ask
Reply = Pushed | Fetched | Done | Status | Refused

_encoder = msgspec.msgpack.Encoder()
_decoder: msgspec.msgpack.Decoder[Request | Reply] = msgspec.msgpack.Decoder(Request | Reply)


def encode(message: Request | Reply) -> bytes:
    """Return the frame of a message."""
    return VERSION + _encoder.encode(message)


def decode(frame: bytes) -> Request | Reply:
    """Return the message of a frame, or raise WireError."""
    if len(frame) > MAX_MESSAGE_BYTES:
        raise WireError(f"message of {len(frame)} bytes, limit {MAX_MESSAGE_BYTES}")
    if not frame.startswith(VERSION):
        raise WireError("not a message of this protocol version")
    try:
        message = _decoder.decode(frame[len(VERSION) :])
    except UNREADABLE as problem:
        raise WireError(f"malformed message: {problem}") from None
    _check_arrays(message)
    return message


def pack_tokens(tokens: NDArray[np.int32]) -> bytes:
    """Return tokens as they travel."""
    return tokens.astype("<i4", copy=False).tobytes()


def unpack_tokens(packed: bytes) -> NDArray[np.int32]:
    """Return the tokens of a checked message."""
    return np.frombuffer(packed, "<i4").astype(np.int32, copy=False)


def _check_arrays(message: Request | Reply) -> None:
    if isinstance(message, Push | Fetched):
        for tail in message.tails:
            if len(tail.tokens) % 4:
                raise WireError("tokens are not whole numbers of four bytes")
            if tail.tokens and np.frombuffer(tail.tokens, "<i4").min() < 0:
                raise WireError("a token is negative")
            if tail.start + len(tail.tokens) // 4 >= 2**31:
                raise WireError("a stream is longer than any response")
    elif isinstance(message, Fetch):
        for known in message.known:
            if len(known.requests) % 8 or len(known.requests) != 2 * len(known.lengths):
                raise WireError("streams and lengths of a group do not match")
