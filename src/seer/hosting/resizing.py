# SPDX-License-Identifier: Apache-2.0
"""Starting several instances at once, and which of them may join a fleet or be removed from it."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence

from seer.engine.base import OutputSink
from seer.errors import ConfigError, InstanceError
from seer.hosting.process import ProcessInstance
from seer.hosting.rank_group import RankEnded


async def start_all(instances: Sequence[ProcessInstance], sink: OutputSink) -> None:
    """Start all at once and wait for each; raises the first failure when none is starting any more.

    That of an instance which ended because another did says less than the other's.
    """
    started = await asyncio.gather(*(instance.start(sink) for instance in instances), return_exceptions=True)
    failures = [result for result in started if isinstance(result, BaseException)]
    if failures:
        raise next((one for one in failures if not isinstance(one, RankEnded)), failures[0])


def refuse_lost(instances: Sequence[ProcessInstance]) -> None:
    """Raise an InstanceError if one of them has gone down since it started."""
    lost = [instance.id for instance in instances if not instance.is_up]
    if lost:
        raise InstanceError(
            f"of {len(instances)} new instances, {lost} were lost before all were ready: none was added",
            hint="see their logs, and add them again",
        )


def refuse_other_blocks(instances: Sequence[ProcessInstance], first: ProcessInstance) -> None:
    """Raise a ConfigError if one of them has KV blocks of another size than those that are there."""
    for instance in instances:
        if instance.limits.block_size != first.limits.block_size:
            raise ConfigError(
                f"a new instance has blocks of {instance.limits.block_size} tokens, the others of "
                f"{first.limits.block_size}: none was added",
                hint="KV moves between instances in blocks: use one block size",
            )


def refuse_part_of_ranks(num_instances: int, *, num_together: int) -> None:
    """Raise a ConfigError unless instances that share experts, `num_together` in a row, join together."""
    if num_instances % num_together:
        raise ConfigError(
            f"{num_instances} more instances, and {num_together} share experts (data_parallel)",
            hint=f"a multiple of {num_together}",
        )


def refuse_removal(ids: Sequence[int], present: Sequence[int], *, num_together: int = 1) -> None:
    """Raise a ConfigError unless all ids are in the fleet, each once, one instance stays, and those that share experts,
    `num_together` in a row, leave together.
    """
    unknown = sorted(set(ids) - set(present))
    if unknown or len(set(ids)) != len(ids):
        raise ConfigError(f"instances {list(ids)} cannot be removed", hint=f"the fleet has {list(present)}; each once")
    for id in ids:
        first = id - id % num_together
        staying = sorted({*range(first, first + num_together)} - set(ids))
        if staying:
            raise ConfigError(
                f"instance {id} shares experts with {staying}, which would stay",
                hint=f"remove instances {first} to {first + num_together - 1} together",
            )
    if len(ids) == len(present):
        raise ConfigError(f"all {len(ids)} instances would be removed", hint="leave one, or close the rollout")
