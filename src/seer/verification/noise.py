# SPDX-License-Identifier: Apache-2.0
"""The noise that a run's tokens were sampled with, and the type its engine computed in.

    seer   the embedded engine's: a function of (seed, position, token)
    vllm   of vLLM's newest runner, which drafts on the GPU use: likewise, and drawn at the position before the token
    none   vLLM's other runners draw from a generator of the request, so samples cannot be repeated one by one

Invariants
  1. `vllm_noise` is what `vllm/v1/worker/gpu/sample/gumbel.py` of vLLM 0.26 adds to the logits, up to rounding.
  2. `scoring_of` reads a configuration and a model's folder: the device of the run need not be there.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Literal

import numpy as np
import torch
from numpy.typing import NDArray

from seer.config import RolloutConfig, VllmEngineConfig
from seer.engine.local.sampling import gumbel

if TYPE_CHECKING:
    from seer.engine.vllm.model_folder import ModelFolder

NoiseName = Literal["seer", "vllm", "none"]
LOW = np.uint64(0xFFFFFFFF)
LEAST_UNIFORM = 4.6566127342e-10
"""Triton's factor from 31 bits to a number below 1."""
ROUNDS = 10
"""Of Philox 4x32."""


@dataclass(frozen=True, slots=True)
class Scoring:
    """What a verification must know of an engine."""

    dtype: str = "float32"
    """What it computed in."""
    noise: NoiseName = "seer"


def scoring_of(config: RolloutConfig, model_dir: Path) -> Scoring:
    """How responses of this configuration were sampled."""
    on_cpu = config.on_cpu
    if config.engine == "local":
        return Scoring(engine_dtype(config.dtype, config.device))
    from seer.engine.vllm.model_folder import read_folder

    folder = read_folder(model_dir)
    dtype = _type_of(config.dtype, "float32" if on_cpu else folder.stored_dtype)
    return Scoring(dtype, _noise_of_vllm(config, folder))


def engine_dtype(dtype: str, device: str) -> str:
    """The type that the embedded engine computes in under these settings."""
    return _type_of(dtype, "float32" if device == "cpu" else "bfloat16")


def noise_at(name: NoiseName, seed: int, position: int, width: int) -> torch.Tensor | None:
    """Noise of each of `width` tokens at a position; None where it is not known."""
    if name == "seer":
        return gumbel(seed, position, width)
    return None if name == "none" else torch.from_numpy(vllm_noise(seed, position - 1, width))


def vllm_noise(seed: int, position: int, width: int) -> NDArray[np.float64]:
    """vLLM's noise of every token after `position`."""
    inner = int(philox(seed, np.array([position], np.uint64))[0])
    drawn = philox(inner, np.arange(width, dtype=np.uint64)).astype(np.uint32).view(np.int32)
    uniform = np.where(drawn < 0, -drawn - 1, drawn).astype(np.float32) * np.float32(LEAST_UNIFORM)
    least = np.maximum(uniform.astype(np.float64), LEAST_UNIFORM)
    noise: NDArray[np.float64] = -np.log(-np.log1p(-least))
    return noise


def philox(seed: int, counter: NDArray[np.uint64]) -> NDArray[np.uint64]:
    """The first of the four 32-bit numbers of Philox 4x32-10, as Triton has it."""
    c0, zero = counter & LOW, np.zeros_like(counter)
    c1, c2, c3 = zero, zero, zero
    keys = [seed & 0xFFFFFFFF, (seed >> 32) & 0xFFFFFFFF]
    for _ in range(ROUNDS):
        first, second = np.uint64(0xD2511F53) * c0, np.uint64(0xCD9E8D57) * c2
        c0, c2 = (second >> np.uint64(32)) ^ c1 ^ np.uint64(keys[0]), (first >> np.uint64(32)) ^ c3 ^ np.uint64(keys[1])
        c1, c3 = second & LOW, first & LOW
        keys = [(keys[0] + 0x9E3779B9) & 0xFFFFFFFF, (keys[1] + 0xBB67AE85) & 0xFFFFFFFF]
    return c0


def _type_of(asked: str, default: str) -> str:
    return default if asked == "auto" else {"half": "float16", "float": "float32"}.get(asked, asked)


def _noise_of_vllm(config: RolloutConfig, folder: ModelFolder) -> NoiseName:
    from seer.engine.vllm.fitting import DRAFTED_VERSION, default_speculation
    from seer.engine.vllm.version import minor_version

    if config.on_cpu or config.speculation == "off" or minor_version() != DRAFTED_VERSION:
        return "none"  # newer ones draw other noise
    engine = config.engine_settings
    chosen = engine.speculation if isinstance(engine, VllmEngineConfig) else None
    chosen = chosen or default_speculation(folder, on_cpu=False, tensor_parallel=config.tensor_parallel)
    return "vllm" if chosen is not None and chosen.place == "gpu" else "none"
