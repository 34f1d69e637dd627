# SPDX-License-Identifier: Apache-2.0
"""The names of vLLM that grouped drafts on the GPU replace, each checked for the version at hand.

    VllmConfig._get_v2_model_runner_unsupported_features   older than 0.32: accepts "ngram_gpu", whose place ours takes
    v1.worker.gpu.model_runner.init_speculator             makes our speculator
    v1.worker.gpu.spec_decode.rejection_sampler.rejection_sample
                                                           accepts what plain vLLM would have sampled

On a version that lacks one of them, or where one takes arguments that we do not know, the engine runs plain vLLM, and
one line in its log says why. tests/vllm_names.json has what 0.26 to 0.33 have.
"""

from __future__ import annotations

import importlib
import inspect
import logging
import os
from dataclasses import replace
from typing import Any

from seer.engine.vllm.guards import Names, missing_name
from seer.engine.vllm.settings import VllmSettings

log = logging.getLogger(__name__)

CONFIG_CHECK = "_get_v2_model_runner_unsupported_features"
NEEDED: Names = (
    ("vllm.v1.worker.gpu.model_runner", "init_speculator", ()),
    ("vllm.v1.worker.gpu.model_runner", "GPUModelRunner", ("add_requests", "finish_requests")),
    ("vllm.v1.worker.gpu.spec_decode.speculator", "BaseSpeculator", ("init_cudagraph_manager", "capture", "propose")),
    ("vllm.v1.worker.gpu.spec_decode.rejection_sampler", "rejection_sample", ()),
    ("vllm.v1.worker.gpu.sample.gumbel", "gumbel_sample", ()),
    ("vllm.v1.worker.gpu.cudagraph_utils", "BatchExecutionDescriptor", ()),
    ("vllm.v1.worker.gpu_worker", "Worker", ("init_device", "initialize_from_config")),
)
CALLED: tuple[tuple[str, str, tuple[str, ...], tuple[str, ...]], ...] = (
    (
        "vllm.v1.worker.gpu.spec_decode.rejection_sampler",
        "rejection_sample",
        (
            "target_logits",
            "draft_logits",
            "draft_sampled",
            "cu_num_logits",
            "pos",
            "idx_mapping",
            "expanded_idx_mapping",
            "expanded_local_pos",
            "temperature",
            "seed",
            "num_speculative_steps",
            "synthetic_conditional_rates",
            "use_fp64",
            "use_block_verification",
        ),
        (
            "contexts",
            "watermarking",
            "watermarking_skip_mask",
            "watermark_key",
            "fly_window_size",
            "fly_entropy_threshold",
            "fly_entropy_top_k",
        ),
    ),
    (
        "vllm.v1.worker.gpu.sample.gumbel",
        "gumbel_sample",
        ("logits", "expanded_idx_mapping", "temperature", "seed", "pos", "apply_temperature"),
        (
            "is_drafting",
            "output_processed_logits",
            "output_processed_logits_col",
            "logits_cache",
            "logits_cache_col",
            "use_fp64",
            "logits_cache_source",
        ),
    ),
)
"""Module, function, the arguments it begins with, and others that were looked at: they are off unless asked for."""


def ready(settings: VllmSettings) -> VllmSettings:
    """Prepare this process to start an engine; drafts are off in what is returned where this vLLM lacks a name."""
    if settings.speculation is None or settings.speculation.place != "gpu":
        return settings
    lacking = missing_names()
    if lacking is not None:
        log.warning("no grouped drafts on the GPU: %s; vLLM runs without drafts", lacking)
        return replace(settings, speculation=None)
    os.environ["VLLM_USE_V2_MODEL_RUNNER"] = "1"
    allow_in_config()
    return settings


def missing_names() -> str | None:
    """What this vLLM lacks of what we replace, or None."""
    return missing_name(NEEDED) or next(filter(None, (_unknown_arguments(*one) for one in CALLED)), None)


def _unknown_arguments(module: str, name: str, first: tuple[str, ...], others: tuple[str, ...]) -> str | None:
    """What a function of this vLLM takes, if that is not what our sampler knows."""
    taken = tuple(inspect.signature(getattr(importlib.import_module(module), name)).parameters)
    if taken[: len(first)] == first and set(taken[len(first) :]) <= set(others):
        return None
    return f"{name} takes {', '.join(taken)}"


def allow_in_config() -> None:
    """Let vLLM's check of the newest runner accept our drafts; called in every process, before a config is made."""
    from vllm.config import VllmConfig

    original = getattr(VllmConfig, CONFIG_CHECK, None)
    if original is None or getattr(original, "is_seers", False):
        return

    def unsupported_features(self: Any) -> list[str]:
        found = original(self)
        is_ours = "seer" in (self.additional_config or {}) and self.speculative_config is not None
        return [name for name in found if "ngram" not in name] if is_ours else found

    unsupported_features.is_seers = True  # type: ignore[attr-defined]
    setattr(VllmConfig, CONFIG_CHECK, unsupported_features)
