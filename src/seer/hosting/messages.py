"""What the driver's process and an instance's process say to each other.

Every message is one msgpack frame (see channel.py). `Setup` is the first frame downwards, `Ready` or
`StartFailed` the first one upwards; after that each side speaks when it has something to say.

    down   Setup, Submit, Abort, Call, Close
    up     Ready | StartFailed, News (outputs, events and a view; an empty one is a heartbeat), CallResult (to a Call)
"""

from __future__ import annotations

from typing import Any

import msgspec

import seer.errors
from seer.engine.base import InstanceView
from seer.errors import InstanceError, SeerError
from seer.metrics.events import Event
from seer.types import Chunk, ChunkOutput, InstanceLimits


class Setup(msgspec.Struct, frozen=True, tag=True, kw_only=True):
    """How to make the instance."""

    id: int
    factory: str
    """`module:function`, called with the id, the settings and an event sink."""
    settings: dict[str, Any]
    core: int | None
    """The CPU core to stay on."""
    flush_s: float
    flush_tokens: int
    heartbeat_s: float


class Submit(msgspec.Struct, frozen=True, tag=True):
    """Take a chunk in hand."""

    chunk: Chunk


class Abort(msgspec.Struct, frozen=True, tag=True):
    """Stop working on a request."""

    request: int


class Call(msgspec.Struct, frozen=True, tag=True):
    """Await one of the instance's coroutine methods; answered by an `CallResult` with the same number."""

    number: int
    method: str
    arguments: dict[str, Any]


class Close(msgspec.Struct, frozen=True, tag=True):
    """Free everything and exit."""


class Ready(msgspec.Struct, frozen=True, tag=True):
    """The instance takes chunks from now on."""

    limits: InstanceLimits
    view: InstanceView


class StartFailed(msgspec.Struct, frozen=True, tag=True):
    """The instance could not be made."""

    error: str
    kind: str
    hint: str | None = None


class News(msgspec.Struct, frozen=True, tag=True):
    """What happened since the last news."""

    outputs: list[ChunkOutput]
    events: list[Event]
    view: InstanceView


class CallResult(msgspec.Struct, frozen=True, tag=True):
    """A call has returned, or raised."""

    number: int
    error: str | None = None
    kind: str | None = None
    hint: str | None = None


Down = Setup | Submit | Abort | Call | Close
Up = Ready | StartFailed | News | CallResult


def describe_error(error: BaseException) -> tuple[str, str, str | None]:
    """Message, class name and hint of an error, to be raised again on the other side."""
    if isinstance(error, SeerError):
        return str(error), type(error).__name__, error.hint
    return f"{type(error).__name__}: {error}", InstanceError.__name__, None


def revive_error(message: str, kind: str | None, hint: str | None) -> SeerError:
    """The error that `describe_error` described; ours keep their class, others become `InstanceError`."""
    found = getattr(seer.errors, kind or "", None)
    if isinstance(found, type) and issubclass(found, SeerError):
        error = found.__new__(found)
        SeerError.__init__(error, message, hint=hint)
        return error
    return InstanceError(message, hint=hint)
