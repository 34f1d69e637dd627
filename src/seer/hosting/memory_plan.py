# SPDX-License-Identifier: Apache-2.0
"""How much memory a rollout takes, before anything starts: weights, KV of each instance, the pool.

The pool's size is decided here for real runs too, so the plan of `--dry-run` is what a run would do. What an engine
measures only when it starts is None.
"""

from __future__ import annotations

import math
from collections import Counter
from dataclasses import asdict, dataclass
from typing import Any

from seer.config import LocalEngineConfig, RolloutConfig
from seer.engine.free_memory import free_memory_bytes
from seer.engine.gpu_memory import free_gpu_bytes
from seer.engine.prepare import PreparedEngine, instances_per_gpu
from seer.errors import ConfigError
from seer.hosting.devices import assign_devices
from seer.hosting.fleet_pool import default_pool_bytes, wanted_pool_bytes
from seer.hosting.pool_ssd import SsdTier, ssd_tier
from seer.machine.safetensors_header import read_header
from seer.machine.sizes import show_size

EXPERTS = ".experts."
"""In the names of their tensors. Shared experts, which every token passes through, are `.shared_experts.`."""
ON_NODES = "the instances run on nodes of a cluster, whose memory `seer doctor --ray` shows"


@dataclass(frozen=True, slots=True, kw_only=True)
class MemoryPlan:
    """Sizes in bytes; None where only the engine can say, or where there is no such device."""

    device: str
    """`cpu`, or the GPU with most instances."""
    num_instances: int
    num_on_device: int
    """Of the instances; all of them on a CPU."""
    tensor_parallel: int
    data_parallel: int
    weights_bytes: int | None
    """One copy of the weights, in the type the engine computes in."""
    expert_bytes: int | None
    """Of them those of experts, of which each instance has its part where instances share them."""
    num_weight_copies: int
    """Copies on the device: CPU instances of the local engine share one."""
    kv_bytes_per_instance: int | None
    """On the device: with tensor parallelism, of one rank."""
    kv_tokens_per_instance: int | None
    pool_bytes: int | None
    """In main memory; 0 is no pool."""
    pool_ssd_bytes: int
    """On SSD; 0 is no SSD tier."""
    free_device_bytes: int | None
    free_host_bytes: int
    refusal: str | None = None
    """Why the instances cannot be put on this machine's GPUs, or are not on this machine at all."""

    @property
    def device_bytes(self) -> int | None:
        """Weights and KV of all instances; activations and captured graphs come on top."""
        if self.weights_bytes is None or self.kv_bytes_per_instance is None:
            return None
        shared_bytes = self.expert_bytes or 0
        one_copy = self.weights_bytes - shared_bytes + shared_bytes // self.data_parallel
        weights_bytes = self.num_weight_copies * one_copy // self.tensor_parallel
        return weights_bytes + self.num_on_device * self.kv_bytes_per_instance

    def notes(self) -> list[str]:
        """What a reader of the plan must know."""
        notes = []
        on_cpu = self.device == "cpu"
        if self.refusal is not None:
            notes.append(self.refusal)
        elif not on_cpu and self.num_on_device > 1:
            notes.append(f"{self.num_on_device} instances share {self.device}, as share_gpus asks")
        if not on_cpu and self.free_device_bytes is None and self.refusal is None:
            notes.append(f"there is no {self.device} on this machine: sizes that follow its free memory are not known")
        elif self.kv_bytes_per_instance is None:
            notes.append("the engine measures its KV memory when it starts")
        needed = (self.device_bytes or 0) + ((self.pool_bytes or 0) if on_cpu else 0)
        if self.free_device_bytes is not None and needed > self.free_device_bytes:
            notes.append(
                f"{_show(needed)} are needed and {_show(self.free_device_bytes)} are free: lower the KV memory"
            )
        return notes

    def as_values(self) -> dict[str, Any]:
        """For JSON."""
        return asdict(self) | {"device_bytes": self.device_bytes, "notes": self.notes()}

    def lines(self) -> list[str]:
        """For people."""
        copies = f", {self.num_weight_copies} copies" if self.num_weight_copies > 1 else ", one copy"
        tokens = "" if self.kv_tokens_per_instance is None else f", {self.kv_tokens_per_instance:,} tokens"
        pool = "a Mooncake store" if self.pool_bytes is None else _show(self.pool_bytes) if self.pool_bytes else "none"
        device = "main memory" if self.device == "cpu" else self.device
        experts = f"; {_show(self.expert_bytes)} of it experts, over {self.data_parallel} instances"
        shared = "" if self.data_parallel == 1 else experts
        return [
            f"weights           {_show(self.weights_bytes)}{copies}{shared}",
            f"KV per instance   {_show(self.kv_bytes_per_instance)}{tokens}",
            f"weights and KV    {_show(self.device_bytes)} of {device}, {_show(self.free_device_bytes)} free",
            f"pool              {pool} of main memory, {_show(self.free_host_bytes)} free",
            *([f"pool on SSD       {_show(self.pool_ssd_bytes)}"] if self.pool_ssd_bytes else []),
            *(f"note: {note}" for note in self.notes()),
        ]


def _show(num_bytes: int | None) -> str:
    return "unknown" if num_bytes is None else show_size(num_bytes)


def pool_bytes(engine: PreparedEngine) -> int | None:
    """The size of the pool; 0 is no pool, None a pool whose size is its own (Mooncake)."""
    config = engine.config
    # One instance shares KV with no other: a pool holds its paused requests only, so it has one where it is asked for.
    # An engine without blocks has none.
    is_asked_for = config.pool.ssd_dir is not None or config.pool.memory_bytes is not None
    if not engine.block_bytes or not (config.instances > 1 or is_asked_for) or config.pool.backend == "none":
        return 0
    if config.hosting.ray is not None and config.pool.backend == "local":
        return 0  # nodes share no memory
    if config.pool.backend == "mooncake" and config.pool.memory_bytes != 0:
        return None
    if config.pool.memory_bytes is not None:
        return config.pool.memory_bytes
    return default_pool_bytes(_kv_bytes(engine), config.instances * config.tensor_parallel)


def node_pool_bytes(engine: PreparedEngine) -> int:
    """What each node of a cluster gives to a pool over all of them, if it has so much."""
    config = engine.config
    return config.pool.memory_bytes or wanted_pool_bytes(_kv_bytes(engine), config.instances * config.tensor_parallel)


def _kv_bytes(engine: PreparedEngine) -> int | None:
    kv, block_bytes = engine.config.kv, engine.block_bytes or 0
    return kv.blocks * block_bytes if kv.blocks else kv.memory_bytes


def pool_ssd(engine: PreparedEngine) -> SsdTier | None:
    """The SSD tier of the pool; None for none."""
    return ssd_tier(engine.config.pool, pool_bytes(engine) or 0)


def plan_memory(engine: PreparedEngine) -> MemoryPlan:
    """The plan for a prepared engine on this machine, now."""
    config = engine.config
    gpu, refusal = _first_gpu(config)
    free_host = free_memory_bytes()
    free_device = free_host if gpu is None else free_gpu_bytes(gpu)
    if config.hosting.ray is not None:
        free_device, refusal = None, ON_NODES
    kv_blocks = _kv_blocks(engine, free_device)
    kv_bytes = None if kv_blocks is None or engine.block_bytes is None else kv_blocks * engine.block_bytes
    ssd, weights = pool_ssd(engine), _weights_bytes(engine)
    num_on_device = config.instances if config.on_cpu and config.hosting.ray is None else instances_per_gpu(config)
    is_shared = engine.shares_matrices and config.instances > 1 and config.hosting.ray is None
    return MemoryPlan(
        device=config.device if gpu is None else f"cuda:{gpu}",
        num_instances=config.instances,
        num_on_device=num_on_device,
        tensor_parallel=config.tensor_parallel,
        data_parallel=config.data_parallel,
        weights_bytes=None if weights is None else sum(weights),
        expert_bytes=None if weights is None else weights[1],
        num_weight_copies=1 if is_shared else num_on_device,
        kv_bytes_per_instance=kv_bytes,
        kv_tokens_per_instance=None if kv_blocks is None else kv_blocks * config.kv.block_size,
        pool_bytes=pool_bytes(engine),
        pool_ssd_bytes=0 if ssd is None else ssd.num_bytes,
        free_device_bytes=free_device,
        free_host_bytes=free_host,
        refusal=refusal if free_device is not None or refusal == ON_NODES else None,
    )


def _first_gpu(config: RolloutConfig) -> tuple[int | None, str | None]:
    """The GPU with most instances, and why the instances cannot be put on GPUs."""
    if config.on_cpu or config.hosting.ray is not None:
        return None, None
    try:
        return assign_devices(config)[0].gpus[0], None
    except ConfigError as error:
        return (config.chosen_gpus(1) or (0,))[0], str(error)


def _kv_blocks(engine: PreparedEngine, free_device_bytes: int | None) -> int | None:
    """KV blocks of an instance, as the engine will choose them."""
    config = engine.config
    if config.kv.blocks is not None or not engine.block_bytes:
        return config.kv.blocks
    memory_bytes = config.kv.memory_bytes
    if isinstance(config.engine_settings, LocalEngineConfig):
        share = config.engine_settings.memory_share
        if memory_bytes is None and share is not None and free_device_bytes is not None:
            memory_bytes = int(share * free_device_bytes)
        if memory_bytes is None:
            return None
        assert config.max_num_seqs is not None, "the configuration was fitted to its device"
        most = config.max_num_seqs * -(-engine.max_model_len // config.kv.block_size)
        return min(most, memory_bytes // engine.block_bytes)
    return None if memory_bytes is None else memory_bytes // engine.block_bytes


def _weights_bytes(engine: PreparedEngine) -> tuple[int, int] | None:
    """Weights that are not of experts, and those that are, from the headers of the weight files; None without any."""
    if engine.model_dir is None or engine.value_bytes is None:
        return None
    files = sorted(engine.model_dir.glob("*.safetensors"))
    if not files:
        return None
    sizes = Counter[bool]()
    for file in files:
        for name, tensor in read_header(file).items():
            sizes[EXPERTS in name] += math.prod(tensor.shape)
    return engine.value_bytes * sizes[False], engine.value_bytes * sizes[True]
