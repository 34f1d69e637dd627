# SPDX-License-Identifier: Apache-2.0
"""The state of a fleet at one moment, for people and metrics."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field


@dataclass(frozen=True, slots=True)
class InstanceSample:
    """The state of an instance at one moment."""

    is_up: bool
    num_running: int
    num_waiting: int
    kv_usage: float
    """Share of its KV memory that running requests hold."""


@dataclass(frozen=True, slots=True, kw_only=True)
class FleetSample:
    """The state of the fleet at one moment."""

    instances: Sequence[InstanceSample]
    weights_version: int = 0
    num_lost: int = 0
    pool_used_bytes: Mapping[str, int] = field(default_factory=dict)
    """By tier."""
    pool_capacity_bytes: Mapping[str, int] = field(default_factory=dict)
    num_abandoned_calls: int = 0
    """Calls of tools and rewards that ignored their cancellation, since the process began."""
    refused: int = 0
    """Requests that the server answered with 429."""
