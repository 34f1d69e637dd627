# SPDX-License-Identifier: Apache-2.0
"""The names of vLLM that grouped drafts on the GPU replace, each checked for the version at hand.

    VllmConfig._get_v2_model_runner_unsupported_features   older than 0.32: accepts "ngram_gpu", whose place ours takes
    v1.worker.gpu.model_runner.init_speculator             makes our speculator
    runner.rejection_sampler                               accepts what plain vLLM would have sampled

On a version that lacks one of them the engine runs plain vLLM, and one line in its log says why.
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
    ("vllm.v1.worker.gpu.spec_decode.speculator", "BaseSpeculator", ()),
    ("vllm.v1.worker.gpu.spec_decode.rejection_sampler", "RejectionSampler", ()),
    ("vllm.v1.worker.gpu.input_batch", "get_num_sampled_and_rejected", ()),
    ("vllm.v1.worker.gpu.sample.output", "SamplerOutput", ()),
)
SAMPLER_ARGUMENTS = ("logits", "input_batch", "draft_logits")


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
    lacking = missing_name(NEEDED)
    if lacking is not None:
        return lacking
    sampler = importlib.import_module("vllm.v1.worker.gpu.spec_decode.rejection_sampler").RejectionSampler
    arguments = tuple(inspect.signature(sampler.__call__).parameters)[1:4]
    if arguments != SAMPLER_ARGUMENTS:
        return f"the rejection sampler takes {', '.join(arguments)}"
    return None


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
