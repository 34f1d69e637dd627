# SPDX-License-Identifier: Apache-2.0
"""What a session needs of its instances: `HostedFleet` has it, and so has a fleet of instances that others started."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Protocol

from seer.engine.base import Instance, Weights
from seer.errors import SeerError
from seer.hosting.fleet_pool import FleetPool
from seer.hosting.loop_slot import InstanceListener
from seer.metrics.events import EventSink
from seer.types import ChunkOutput, DraftMode, InstanceLimits


class SessionFleet(Protocol):
    """Instances of one model, which serve one rollout loop at a time."""

    pool: FleetPool | None

    @property
    def instances(self) -> Sequence[Instance]:
        """All of them, by id."""

    @property
    def limits(self) -> Sequence[InstanceLimits]:
        """Of each instance that was not removed."""

    @property
    def weights_version(self) -> int:
        """Of the weights that they hold."""

    async def begin_run(self, run: str, drafts: DraftMode, past: Mapping[int, Sequence[Sequence[int]]]) -> None:
        """Start drafting anew."""

    async def update_weights(self, weights: Weights) -> int:
        """Switch all instances to new weights, while no chunk runs; returns the new version."""

    def end_group(self, group: int) -> None:
        """Forget a group's drafts."""

    def attach(
        self,
        loop: InstanceListener,
        *,
        events: EventSink,
        on_output: Callable[[ChunkOutput], None],
        on_failure: Callable[[SeerError], None],
    ) -> None:
        """Serve this loop from now on."""

    def detach(self) -> None:
        """The loop has ended."""
