# SPDX-License-Identifier: Apache-2.0
"""What each instance of a fleet runs on: its own GPUs, shown to its process by the environment, or CPU cores."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass, field

from seer.config import RolloutConfig
from seer.engine.gpu_memory import num_visible_gpus
from seer.machine.cores import assign_cores, numa_nodes
from seer.machine.gpus import VISIBLE, assign_gpus, refuse_invisible, visible_value


@dataclass(frozen=True, slots=True, kw_only=True)
class InstanceDevices:
    """The devices of one instance."""

    gpus: tuple[int, ...] = ()
    """As CUDA numbers them in the driver's process."""
    cores: tuple[int, ...] | None = None
    """CPU cores that its process is kept on; None for all."""
    environment: Mapping[str, str] = field(default_factory=dict)
    """Added to the environment of its process."""


def assign_devices(config: RolloutConfig) -> list[InstanceDevices]:
    """The devices of each instance; refuses a machine with too few GPUs. `config` was fitted to its device."""
    cores = _cores(config)
    if config.on_cpu:
        return [InstanceDevices(cores=own) for own in cores]
    num_visible = num_visible_gpus()
    gpus = config.chosen_gpus(num_visible)
    refuse_invisible(gpus, num_visible)
    each = assign_gpus(gpus, config.instances, config.tensor_parallel, share=config.share_gpus)
    visible = os.environ.get(VISIBLE)
    return [
        InstanceDevices(gpus=own, cores=near, environment={VISIBLE: visible_value(own, visible)})
        for own, near in zip(each, cores, strict=True)
    ]


def _cores(config: RolloutConfig) -> list[tuple[int, ...]] | list[None]:
    if not config.hosting.pin_cores:
        return [None] * config.instances
    return assign_cores(os.sched_getaffinity(0), numa_nodes(), config.instances, config.tensor_parallel)
