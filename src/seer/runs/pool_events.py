# SPDX-License-Identifier: Apache-2.0
"""What the KV pool did during a run, as events: the difference of the counts that all its processes share."""

from __future__ import annotations

from seer.kvpool.base import PoolStats
from seer.metrics.events import PoolErrors, PoolUsed


def pool_events(now_s: float, before: PoolStats | None, after: PoolStats | None) -> list[PoolErrors | PoolUsed]:
    """The events of a run; none where no block was offered, or where the pool keeps no such counts (Mooncake)."""
    if before is None or after is None:
        return []
    events: list[PoolErrors | PoolUsed] = []
    if after.num_put > before.num_put or after.num_refused > before.num_refused:
        events.append(_used(now_s, before, after))
    num_failed, num_corrupt = after.num_failed - before.num_failed, after.num_corrupt - before.num_corrupt
    if num_failed or num_corrupt:
        events.append(PoolErrors(now_s, None, num_failed=num_failed, num_corrupt=num_corrupt))
    return events


def _used(now_s: float, before: PoolStats, after: PoolStats) -> PoolUsed:
    return PoolUsed(
        now_s,
        block_bytes=after.block_bytes,
        num_put=after.num_put - before.num_put,
        num_refused=after.num_refused - before.num_refused,
        num_hit_dram=after.num_hit_dram - before.num_hit_dram,
        num_hit_ssd=after.num_hit_ssd - before.num_hit_ssd,
        num_spilled=after.num_spilled - before.num_spilled,
        num_prefetched=after.num_prefetched - before.num_prefetched,
    )
