# SPDX-License-Identifier: Apache-2.0
"""Build an engine: limits, dtype, device, weights, kernels.

The parts are chosen here only, so that the instance, the benchmarks and the tests run the same engine.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import torch

from seer.drafting.base import DeferredIndexing, DraftBudget, Drafter
from seer.engine.base import InstanceLimits, Weights
from seer.engine.free_memory import free_memory_bytes
from seer.engine.local import cpu_ops
from seer.engine.local.batch_scheduler import BatchScheduler
from seer.engine.local.cache import KVCache, block_bytes, model_identity
from seer.engine.local.engine import Engine
from seer.engine.local.model import Model
from seer.engine.local.model_config import ModelConfig
from seer.engine.local.ops import Ops, TorchOps
from seer.engine.local.rotary import RotaryTable
from seer.engine.local.runner import PlainRunner, Runner
from seer.engine.local.shared import shared_weights
from seer.errors import ConfigError
from seer.kvpool.base import Pool
from seer.speculation.step_report import StepObserver

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}
"""By the name a user gives."""
MEMORY_SHARE = 0.3
"""Share of the free memory used for KV when no KV size is given. Low, because other instances start beside this one."""


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineSettings:
    """How an engine runs. How much it can hold is in `InstanceLimits`."""

    dtype: torch.dtype = torch.float32
    device: torch.device = torch.device("cpu")  # noqa: RUF009 - immutable
    weights_version: int = 0
    max_step_tokens: int = 512
    """Batched tokens of one forward pass. Longer contexts are prefilled in pieces of at most this."""
    stream_tokens: int = 16
    """A request is reported each time it has generated this many tokens."""
    drafter: Drafter | None = None
    budget: DraftBudget | None = None
    pool: Pool | None = None
    on_step: StepObserver | None = None
    kernels: str = "auto"
    """`auto`: the fastest for the device. `torch`: the PyTorch specification. `triton`: the GPU kernels, which need
    Triton's interpreter where there is no GPU."""
    matrices_dir: Path | None = None
    """Folder in which processes share packed matrices on a CPU. None: each process packs its own."""


def assemble(
    instance: int,
    folder: Path,
    config: ModelConfig,
    limits: InstanceLimits,
    settings: EngineSettings,
    *,
    busy: Callable[[], bool] | None = None,
    weights: Weights | None = None,
) -> Engine:
    """Load the weights and build an engine.

    `busy` says whether the engine has work: engines that share its weights ask before they update them. Without
    `weights`, the folder's own weights are loaded.
    """
    cache = KVCache(
        config,
        num_blocks=limits.kv_blocks,
        num_scratch_tokens=settings.max_step_tokens if settings.drafter is not None else 0,
        block_size=limits.block_size,
        dtype=settings.dtype,
        device=settings.device,
    )
    ops = _choose_ops(cache, settings.kernels)
    scheduler = BatchScheduler(
        cache,
        max_num_seqs=limits.max_num_seqs,
        max_model_len=limits.max_model_len,
        max_step_tokens=settings.max_step_tokens,
        pool=settings.pool,
        drafter=settings.drafter,
        budget=settings.budget,
    )
    shared = shared_weights(folder, config, ops, settings.dtype, settings.device, matrices_dir=settings.matrices_dir)
    loaded = shared.load(folder if weights is None else weights, settings.weights_version, ops, scheduler)
    shared.join(scheduler, busy or (lambda: bool(scheduler.running or scheduler.waiting)))
    model = Model(config, ops, loaded)
    return Engine(
        instance,
        model=model,
        runner=_choose_runner(model, scheduler),
        scheduler=scheduler,
        shared=shared,
        namespace=cache.namespace(model_identity(config, shared.fingerprint), settings.weights_version),
        folder=folder,
        stream_tokens=settings.stream_tokens,
        on_step=settings.on_step,
    )


def update(engine: Engine, weights: Weights, weights_version: int) -> None:
    """Load new weights. KV of the old weights version can no longer be found."""
    assert not engine.busy, "weights change between chunks only"
    engine.shared.load(weights, weights_version, engine.model.ops, engine.scheduler)
    engine.scheduler.blocks.forget_all()
    identity = model_identity(engine.model.config, engine.shared.fingerprint)
    engine.namespace = engine.scheduler.cache.namespace(identity, weights_version)


def choose_dtype(name: str, device: torch.device) -> torch.dtype:
    """The dtype to compute in."""
    if name == "auto":
        # A CPU computes bf16 slowly and inexactly. On a GPU bf16 is the usual choice.
        return torch.float32 if device.type == "cpu" else torch.bfloat16
    if name not in DTYPES:
        raise ConfigError(f"dtype={name!r} is not supported", hint=f"auto, {', '.join(DTYPES)}")
    return DTYPES[name]


def choose_limits(
    config: ModelConfig,
    settings: EngineSettings,
    *,
    block_size: int,
    max_num_seqs: int,
    kv_blocks: int | None = None,
    kv_memory_bytes: int | None = None,
    memory_share: float = MEMORY_SHARE,
    max_model_len: int | None = None,
) -> InstanceLimits:
    """What the engine can hold: the sizes given, or what fits into free memory."""
    for name, value in (("block_size", block_size), ("max_num_seqs", max_num_seqs)):
        if value < 1:
            raise ConfigError(f"{name}={value} must be at least 1")
    if settings.max_step_tokens < max_num_seqs:
        raise ConfigError(
            f"max_step_tokens={settings.max_step_tokens} is below max_num_seqs={max_num_seqs}",
            hint="every running request decodes one token in each step: raise max_step_tokens",
        )
    context = min(max_model_len or config.max_model_len, config.max_model_len)
    size = block_bytes(config, block_size, settings.dtype)
    if kv_blocks is None:
        # No more than all sequence slots can fill.
        most = max_num_seqs * -(-context // block_size)
        memory = int(_free_bytes(settings.device) * memory_share) if kv_memory_bytes is None else kv_memory_bytes
        kv_blocks = min(most, memory // size)
    if kv_blocks < 1:
        raise ConfigError(
            f"no room for a single KV block of {size / 2**20:.1f} MiB",
            hint="raise kv_memory_bytes or lower block_size",
        )
    return InstanceLimits(kv_blocks=kv_blocks, block_size=block_size, max_num_seqs=max_num_seqs, max_model_len=context)


def _choose_ops(cache: KVCache, kernels: str) -> Ops:
    rotary = RotaryTable(cache.config, cache.tensor.device)
    on_cpu = cache.tensor.device.type == "cpu"
    if kernels == "triton" or (kernels == "auto" and not on_cpu):
        from seer.engine.local.gpu_ops import GpuOps

        return GpuOps(cache, rotary)
    if kernels == "auto" and cache.tensor.dtype == torch.float32 and cpu_ops.available():
        return cpu_ops.CpuOps(cache, rotary)
    return TorchOps(cache, rotary)


def _choose_runner(model: Model, scheduler: BatchScheduler) -> Runner:
    if isinstance(model.ops, TorchOps | cpu_ops.CpuOps):
        return PlainRunner(model, scheduler)
    from seer.engine.local.gpu_runner import GpuRunner

    if isinstance(scheduler.drafter, DeferredIndexing):
        return GpuRunner(model, scheduler, while_computing=scheduler.drafter.learn)
    return GpuRunner(model, scheduler)


def _free_bytes(device: torch.device) -> int:
    if device.type == "cuda":
        return int(torch.cuda.mem_get_info(device)[0])
    return free_memory_bytes()
