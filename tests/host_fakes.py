"""Instances with known faults, made inside a child process by `InstanceSpec.factory`."""

from __future__ import annotations

import os
import time
from collections.abc import Mapping, Sequence
from typing import Any

from seer.engine.base import Weights
from seer.engine.fake import FakeInstance
from seer.engine.fake import make_fake as make_configured_fake
from seer.engine.instance_settings import read_settings
from seer.errors import ConfigError
from seer.metrics.events import EventSink
from seer.types import Chunk, DraftMode


class Hanging(FakeInstance):
    """Its event loop stops at the first chunk: the process lives and sends nothing."""

    def submit(self, chunk: Chunk) -> None:
        time.sleep(3600)


class Stuck(FakeInstance):
    """Sends heartbeats, accepts chunks and never steps."""

    def _step_soon(self) -> None:
        """Never."""


class Crashing(FakeInstance):
    """Dies at the first chunk."""

    def submit(self, chunk: Chunk) -> None:
        print(f"instance {self.id} is about to exit", flush=True)
        os._exit(3)


class Noting(FakeInstance):
    """Writes a line for each command into a file."""

    def __init__(self, id: int, notes: str) -> None:
        super().__init__(id)
        self._notes = notes

    async def update_weights(self, weights: Weights, weights_version: int) -> None:
        self._note(f"update_weights {weights} {weights_version}")

    async def begin_run(
        self, run: str, drafts: DraftMode, weights_version: int, past: Mapping[int, Sequence[Sequence[int]]]
    ) -> None:
        self._note(f"begin_run {run} {past}")

    def _note(self, line: str) -> None:
        with open(self._notes, "a") as notes:
            notes.write(f"{line}\n")


def make_noting(id: int, settings: dict[str, Any], events: EventSink) -> FakeInstance:
    return Noting(id, **settings)


def make_hanging(id: int, settings: dict[str, Any], events: EventSink) -> FakeInstance:
    return Hanging(id)


def make_stuck(id: int, settings: dict[str, Any], events: EventSink) -> FakeInstance:
    return Stuck(id)


def make_crashing(id: int, settings: dict[str, Any], events: EventSink) -> FakeInstance:
    return Crashing(id)


def make_refusing(id: int, settings: dict[str, Any], events: EventSink) -> FakeInstance:
    raise ConfigError("no such model", hint="name another")


def make_crashing_once(id: int, settings: dict[str, Any], events: EventSink) -> FakeInstance:
    """Instance 0 dies at its first chunk, once: a file beside the logs remembers that it did."""
    log_dir = read_settings(settings).config.hosting.log_dir
    assert log_dir is not None, "the file needs a folder"
    mark = log_dir / "has-crashed"
    if id == 0 and not mark.exists():
        mark.touch()
        return Crashing(id)
    return make_configured_fake(id, settings, events)


def make_fake(id: int, settings: dict[str, Any], events: EventSink) -> FakeInstance:
    """One without faults; the settings are its own arguments."""
    return FakeInstance(id, events=events, **settings)
