"""Instances with known faults, made inside a child process by `InstanceSpec.factory`."""

from __future__ import annotations

import os
import time
from typing import Any

from seer.engine.fake import FakeInstance, make_fake
from seer.errors import ConfigError
from seer.metrics.events import EventSink
from seer.types import Chunk


class Hanging(FakeInstance):
    """Its event loop stops at the first chunk: the process lives and says nothing."""

    def submit(self, chunk: Chunk) -> None:
        time.sleep(3600)


class Stuck(FakeInstance):
    """Talks, takes chunks and never steps."""

    def _step_soon(self) -> None:
        """Never."""


class Crashing(FakeInstance):
    """Dies at the first chunk."""

    def submit(self, chunk: Chunk) -> None:
        print("the last words of instance", self.id, flush=True)
        os._exit(3)


def make_hanging(id: int, settings: dict[str, Any], events: EventSink) -> FakeInstance:
    return Hanging(id)


def make_stuck(id: int, settings: dict[str, Any], events: EventSink) -> FakeInstance:
    return Stuck(id)


def make_crashing(id: int, settings: dict[str, Any], events: EventSink) -> FakeInstance:
    return Crashing(id)


def make_refusing(id: int, settings: dict[str, Any], events: EventSink) -> FakeInstance:
    raise ConfigError("no such model", hint="name another")


def make_crashing_once(id: int, settings: dict[str, Any], events: EventSink) -> FakeInstance:
    """Instance 0 dies at its first chunk in its first life; the file says which life it is."""
    mark = settings.pop("mark")
    if id == 0 and not os.path.exists(mark):
        with open(mark, "w"):
            return Crashing(id, **settings)
    return make_fake(id, settings, events)
