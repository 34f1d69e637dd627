# SPDX-License-Identifier: Apache-2.0
"""What each instance of a fleet runs on: its own GPUs, shown to its process by the environment, or CPU cores."""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from seer.config import RolloutConfig
from seer.engine.gpu_memory import num_visible_gpus
from seer.machine.cores import assign_cores, numa_nodes
from seer.machine.gpus import VISIBLE, assign_gpus, assign_more_gpus, refuse_invisible, visible_value


@dataclass(frozen=True, slots=True, kw_only=True)
class InstanceNeeds:
    """What an instance needs of the node that a cluster places it on."""

    num_gpus: int = 0
    num_cpus: float = 1.0
    single_thread: bool = False
    """Whether its process has no use for more than one thread."""

    def bundle(self) -> dict[str, float]:
        """As Ray counts resources."""
        return {"CPU": self.num_cpus} | ({"GPU": float(self.num_gpus)} if self.num_gpus else {})


@dataclass(frozen=True, slots=True, kw_only=True)
class InstanceDevices:
    """The devices of one instance."""

    gpus: tuple[int, ...] = ()
    """As CUDA numbers them in the driver's process."""
    cores: tuple[int, ...] | None = None
    """CPU cores that its process is kept on; None for all."""
    environment: Mapping[str, str] = field(default_factory=dict)
    """Added to the environment of its process."""
    needs: InstanceNeeds = InstanceNeeds()
    """What a cluster finds it a place by, which then has the devices."""


def devices_on_nodes(config: RolloutConfig) -> InstanceDevices:
    """The devices of an instance on a cluster."""
    ranks = config.tensor_parallel
    if config.on_cpu:
        return InstanceDevices(needs=InstanceNeeds(num_cpus=ranks, single_thread=True))
    return InstanceDevices(needs=InstanceNeeds(num_gpus=ranks))


def assign_devices(config: RolloutConfig, taken: Sequence[InstanceDevices] = ()) -> list[InstanceDevices]:
    """The devices of each instance; refuses a machine with too few GPUs. `config` was fitted to its device.

    `taken` are those of instances that run already.
    """
    cores = _cores(config, taken)
    if config.on_cpu:
        return [InstanceDevices(cores=own) for own in cores]
    num_visible = num_visible_gpus()
    gpus = config.chosen_gpus(num_visible)
    refuse_invisible(gpus, num_visible)
    num, ranks, share = config.instances, config.tensor_parallel, config.share_gpus
    used = Counter(gpu for own in taken for gpu in own.gpus)
    each = (
        assign_more_gpus(used, gpus, num, ranks, share=share) if taken else assign_gpus(gpus, num, ranks, share=share)
    )
    visible = os.environ.get(VISIBLE)
    return [
        InstanceDevices(gpus=own, cores=near, environment={VISIBLE: visible_value(own, visible)})
        for own, near in zip(each, cores, strict=True)
    ]


def _cores(config: RolloutConfig, taken: Sequence[InstanceDevices]) -> list[tuple[int, ...]] | list[None]:
    num, ranks = config.instances, config.tensor_parallel
    if not config.hosting.pin_cores:
        return [None] * num
    allowed, nodes = os.sched_getaffinity(0), numa_nodes()
    used = {core for own in taken for core in own.cores or ()}
    if len(allowed - used) < num * ranks:
        return assign_cores(allowed, nodes, len(taken) + num, ranks)[len(taken) :]  # they take turns
    emptiest_first = sorted(nodes, key=lambda cores: len(used.intersection(cores)))
    return assign_cores(allowed - used, emptiest_first, num, ranks)
