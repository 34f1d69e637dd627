# SPDX-License-Identifier: Apache-2.0
"""Fits the settings of a vLLM instance to its model: drafts and room for them, memory on a CPU, latent attention."""

from __future__ import annotations

from dataclasses import replace

from seer.config import VllmSpeculation
from seer.engine.vllm.engine_arguments import CPU_LATENT_ARGUMENTS
from seer.engine.vllm.model_folder import ModelFolder
from seer.engine.vllm.settings import (
    CPU_BLOCK_SIZE,
    CPU_BLOCK_STEP,
    CPU_LATENT_BLOCK_SIZE,
    CPU_VALUE_BYTES,
    DEFAULT_CPU_KV_BYTES,
    VllmSettings,
)
from seer.engine.vllm.version import minor_version
from seer.errors import ConfigError

DRAFTED = ("Qwen2ForCausalLM", "LlamaForCausalLM")
"""Models that drafts on the GPU have run with; others need to be asked for."""
DRAFTED_VERSION = (0, 26)
"""The vLLM that they have run with."""
SMALL_MODEL_BYTES = 64 << 20
"""Below this size of weights there are no drafts on a CPU unless they are asked for. They need vLLM's synchronous
scheduling, which costs about 2 ms a step, as much as a small model computes (docs/log.md)."""


def default_speculation(folder: ModelFolder, *, on_cpu: bool, tensor_parallel: int) -> VllmSpeculation | None:
    """Drafts where the user says nothing: in the scheduler on a CPU unless the model is small, on the GPU where they
    are known to work.
    """
    if on_cpu:
        return VllmSpeculation() if folder.weights_bytes >= SMALL_MODEL_BYTES else None
    is_known = folder.architecture in DRAFTED and minor_version() == DRAFTED_VERSION and tensor_parallel == 1
    return VllmSpeculation(place="gpu") if is_known else None


def fit_to_model(settings: VllmSettings, folder: ModelFolder) -> VllmSettings:
    """The settings that this model can run with."""
    speculation = settings.speculation
    # Room after the longest context for the drafts of its last step.
    lookahead = speculation.max_draft_tokens + 1 if speculation is not None else 0
    fitting = replace(settings, max_model_len=min(settings.max_model_len, folder.max_model_len - lookahead))
    return _fit_to_cpu(fitting, folder) if settings.device == "cpu" else fitting


def _fit_to_cpu(settings: VllmSettings, folder: ModelFolder) -> VllmSettings:
    """vLLM would take a share of all memory: give it bytes, from the number of blocks where that is set."""
    tokens = cpu_block_size(settings.block_size or CPU_BLOCK_SIZE, folder)
    value_bytes = CPU_VALUE_BYTES.get(settings.dtype, 4)
    block_bytes = folder.block_bytes(tokens, value_bytes, settings.tensor_parallel)
    blocks = settings.kv_blocks or (settings.kv_memory_bytes or DEFAULT_CPU_KV_BYTES) // block_bytes
    if blocks < 1:
        raise ConfigError(
            f"no room for a single KV block of {block_bytes:,} bytes in kv_memory_bytes={settings.kv_memory_bytes}",
            hint="raise kv_memory_bytes or lower block_size",
        )
    engine = CPU_LATENT_ARGUMENTS | settings.engine if folder.latent_dim is not None else settings.engine
    return replace(
        settings, block_size=tokens, kv_blocks=blocks, kv_memory_bytes=(blocks + 1) * block_bytes, engine=engine
    )


def cpu_block_size(block_size: int, folder: ModelFolder) -> int:
    """The next size of a block that vLLM's attention on a CPU takes."""
    if folder.latent_dim is not None:
        return CPU_LATENT_BLOCK_SIZE
    return -(-block_size // CPU_BLOCK_STEP) * CPU_BLOCK_STEP
