# SPDX-License-Identifier: Apache-2.0
"""The messages between the driver's process and an instance's process.

Every message is one msgpack frame (see channel.py). The first frame to the instance is `Setup`, the first frame to
the driver is `Ready` or `StartFailed`. After that either side sends at any time.

    to the instance   Setup, Submit, Extend, Park, Abort, Prefetch, EndGroup, Call, Close
    to the driver     Ready | StartFailed, News (also the heartbeat), CallResult, Broken

A `Call` carries one command: `UpdateWeights`, `BeginRun`, `Pause` or `Resume`.

Invariants
  1. Every `Call` is answered by exactly one `CallResult` with its number, unless the process ends first.
  2. Every frame decodes to one of the types here: a field of another type is an error where it is received.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import msgspec

import seer.errors
from seer.engine.base import InstanceView
from seer.errors import InstanceError, SeerError
from seer.metrics.events import Event
from seer.types import Attempt, Chunk, ChunkOutput, DraftMode, InstanceLimits, Lease


class Setup(msgspec.Struct, frozen=True, tag=True, kw_only=True):
    """How to make the instance."""

    id: int
    factory: str
    """`module:function`, called with the id, the settings and an event sink."""
    settings: dict[str, Any]
    cores: tuple[int, ...] | None
    """The CPU cores to run on; None for all."""
    flush_s: float
    flush_tokens: int
    """See `HostingConfig`, as for `flush_s` and `heartbeat_s`."""
    heartbeat_s: float
    lease_s: float | None = None
    """Serve no longer once the driver has been silent for this long; None on the driver's own machine, where its end is
    always seen."""


class Submit(msgspec.Struct, frozen=True, tag=True):
    """Run chunks; they carry ids and no log-probabilities."""

    chunks: list[Chunk]


class Extend(msgspec.Struct, frozen=True, tag=True):
    """Let attempts generate more."""

    leases: list[Lease]


class Park(msgspec.Struct, frozen=True, tag=True):
    """End leases at the next step boundary."""

    attempts: list[Attempt]


class Abort(msgspec.Struct, frozen=True, tag=True):
    """Stop working on a request."""

    request: int


class Prefetch(msgspec.Struct, frozen=True, tag=True):
    """A request with this chunk's context probably comes next: bring its KV closer."""

    chunk: Chunk


class EndGroup(msgspec.Struct, frozen=True, tag=True):
    """All requests of a group have ended: forget the tokens that drafts of it came from."""

    group: int


class UpdateWeights(msgspec.Struct, frozen=True, tag=True):
    """Load the weights at `path` and run under `weights_version` from now on."""

    path: str
    weights_version: int
    is_staged: bool = False
    """Whether the driver made the file, on its own machine: other machines need a copy of it."""


class BeginRun(msgspec.Struct, frozen=True, tag=True):
    """A new run starts: forget what earlier runs generated, and draft as this run asks."""

    run: str
    """Names the run; no two runs of a fleet share a name."""
    drafts: DraftMode
    weights_version: int
    past: Mapping[int, Sequence[Sequence[int]]] = {}
    """Responses of an earlier epoch to the same prompts, by group."""


class Pause(msgspec.Struct, frozen=True, tag=True):
    """Stop stepping."""


class Resume(msgspec.Struct, frozen=True, tag=True):
    """Step again."""


Command = UpdateWeights | BeginRun | Pause | Resume


class Call(msgspec.Struct, frozen=True, tag=True):
    """Carry out a command; answered by a `CallResult` with the same number."""

    number: int
    command: Command


class Ping(msgspec.Struct, frozen=True, tag=True):
    """Nothing to do: later messages show the instance's process that an earlier one was lost (channel.py)."""


class Close(msgspec.Struct, frozen=True, tag=True):
    """Free everything and exit."""


class Ready(msgspec.Struct, frozen=True, tag=True):
    """The instance takes chunks from now on."""

    limits: InstanceLimits
    view: InstanceView
    vocab_size: int | None = None
    """Token ids are below this; None if the instance has no model."""


class StartFailed(msgspec.Struct, frozen=True, tag=True):
    """The instance could not be made."""

    error: str
    kind: str
    hint: str | None = None


class News(msgspec.Struct, frozen=True, tag=True):
    """Outputs and events since the last news, and a view of now; sent empty as a heartbeat."""

    outputs: list[ChunkOutput]
    events: list[Event]
    view: InstanceView


class CallResult(msgspec.Struct, frozen=True, tag=True):
    """A command was carried out, or raised."""

    number: int
    error: str | None = None
    kind: str | None = None
    hint: str | None = None


class Broken(msgspec.Struct, frozen=True, tag=True):
    """The instance computes nothing more; sent instead of its chunks' ends."""

    error: str
    kind: str
    hint: str | None = None


Down = Setup | Submit | Extend | Park | Abort | Prefetch | EndGroup | Call | Ping | Close
Up = Ready | StartFailed | News | CallResult | Broken


def describe_error(error: BaseException) -> tuple[str, str, str | None]:
    """Message, class name and hint of an error, so that the other side can raise it."""
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
