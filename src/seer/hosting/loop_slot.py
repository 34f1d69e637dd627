# SPDX-License-Identifier: Apache-2.0
"""The rollout loop that a fleet serves, if any: outputs, events and losses go to it, and are dropped otherwise.

Invariant: at most one loop is attached.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol

from seer.engine.base import Instance
from seer.errors import SeerError
from seer.metrics.events import Event, EventSink, discard
from seer.types import ChunkOutput


class InstanceListener(Protocol):
    """What a fleet calls on a rollout loop."""

    def lose_instance(self, instance: int) -> None:
        """The instance is down; its chunks end as FAILED."""

    def rejoin_instance(self, instance: int) -> None:
        """The instance is up again, with empty KV memory."""

    def add_instance(self, instance: Instance) -> None:
        """A new instance takes work from now on."""

    def retire_instance(self, instance: int) -> None:
        """The instance gets no more work; its requests leave it."""


class LoopSlot:
    """The place of the attached loop."""

    def __init__(self) -> None:
        self.loop: InstanceListener | None = None
        self._events: EventSink = discard
        self._on_output: Callable[[ChunkOutput], None] | None = None
        self._on_failure: Callable[[SeerError], None] | None = None

    def attach(
        self,
        loop: InstanceListener,
        events: EventSink,
        on_output: Callable[[ChunkOutput], None],
        on_failure: Callable[[SeerError], None],
    ) -> None:
        """Pass everything on to this loop from now on."""
        assert self.loop is None, "another loop is attached"
        self.loop, self._events, self._on_output, self._on_failure = loop, events, on_output, on_failure

    def detach(self) -> None:
        """The loop has ended; drop everything until the next one."""
        self.loop, self._events, self._on_output, self._on_failure = None, discard, None, None

    def take_output(self, output: ChunkOutput) -> None:
        """An instance has sent an output."""
        if self._on_output is not None:
            self._on_output(output)

    def take_event(self, event: Event) -> None:
        """Something has happened; late bound, so that instances may keep this method."""
        self._events(event)

    def lose(self, instance: int) -> None:
        """An instance is down."""
        if self.loop is not None:
            self.loop.lose_instance(instance)

    def fail(self, error: SeerError) -> None:
        """No instance is left, or the model is broken."""
        if self._on_failure is not None:
            self._on_failure(error)
