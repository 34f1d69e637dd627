# SPDX-License-Identifier: Apache-2.0
"""The state of an instance as people and programs see it; the names are those of NeMo-RL's fleet.

    HEALTHY ──silent for a while──> SUSPECT ──speaks──> HEALTHY
       │                               └──too long──> DEAD
       └──its process ends──> DEAD ──> RESTARTING ──ready──> STALE ──has the newest weights and settings──> HEALTHY
    any ──closed or removed──> RETIRED

Only a HEALTHY or SUSPECT instance is given chunks.
"""

from __future__ import annotations

import enum
from dataclasses import dataclass

SUSPECT_HEARTBEATS = 4
"""Heartbeats that did not come until an instance is suspect."""


class Health(enum.Enum):
    """How an instance does."""

    HEALTHY = "healthy"
    SUSPECT = "suspect"
    """Silent, not yet for long enough to be given up."""
    DEAD = "dead"
    RESTARTING = "restarting"
    """A process is being started for it; also before its first start has ended."""
    STALE = "stale"
    """Its process is up and does not have the newest weights and settings yet."""
    RETIRED = "retired"


@dataclass(frozen=True, slots=True, kw_only=True)
class InstanceStatus:
    """One instance of a fleet at one moment."""

    id: int
    health: Health
    weights_version: int
    """Of the weights it holds; of its last ones while it is down."""
    node: str | None
    """The address of its machine; None on the driver's own."""
    num_running: int
    num_waiting: int
    num_lost: int
    """How often it was lost so far."""
    silent_s: float
    """Since its last message; 0 while it is down."""
