# SPDX-License-Identifier: Apache-2.0
"""The state of a fleet of processes, for metrics."""

from __future__ import annotations

from seer.hosting.fleet import HostedFleet
from seer.metrics.fleet_sample import FleetSample, InstanceSample
from seer.runs.user_calls import UserCalls


def fleet_sample(fleet: HostedFleet) -> FleetSample:
    """As it is now."""
    instances = []
    for one in fleet.instances:
        view = one.view()
        usage = view.used_kv_blocks / max(1, one.limits.kv_blocks) if one.is_up else 0.0
        instances.append(InstanceSample(one.is_up, view.num_running, view.num_waiting, usage))
    stats = fleet.pool.stats() if fleet.pool is not None else None
    return FleetSample(
        instances=instances,
        weights_version=fleet.weights_version,
        num_lost=fleet.num_lost,
        num_abandoned_calls=UserCalls.num_abandoned_in_process,
        pool_used_bytes={"dram": stats.dram_bytes, "ssd": stats.ssd_bytes} if stats is not None else {},
        pool_capacity_bytes=(
            {"dram": stats.dram_capacity_bytes, "ssd": stats.ssd_capacity_bytes} if stats is not None else {}
        ),
    )
