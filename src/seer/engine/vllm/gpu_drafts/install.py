# SPDX-License-Identifier: Apache-2.0
"""The names of vLLM that grouped drafts on the GPU replace, each checked for the version at hand.

    VllmConfig._get_v2_model_runner_unsupported_features   older than 0.32: accepts "ngram_gpu", whose place ours takes
    v1.worker.gpu.model_runner.init_speculator             makes our speculator
    runner.rejection_sampler                               accepts what plain vLLM would have sampled

On a version that lacks one of them, or whose samplers take other arguments, the engine runs plain vLLM, and one line in
its log says why. The arguments are those of 0.26, the version that drafts were measured on.
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
SAMPLING = "vllm.v1.worker.gpu.sample.sampler"
REJECTION = "vllm.v1.worker.gpu.spec_decode.rejection_sampler"
ARGUMENTS: tuple[tuple[str, str, str, tuple[str, ...]], ...] = (
    (REJECTION, "RejectionSampler", "__call__", ("logits", "input_batch", "draft_logits")),
    (
        REJECTION,
        "RejectionSampler",
        "_get_logprobs_tensors",
        ("input_batch", "sampled", "num_sampled", "logits"),
    ),
    (
        SAMPLING,
        "Sampler",
        "sample",
        (
            "logits",
            "expanded_idx_mapping",
            "idx_mapping_np",
            "pos",
            "input_ids",
            "expanded_local_pos",
            "return_logprobs",
        ),
    ),
)
"""Module, class, method, and the arguments that our sampler gives it."""


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
    return missing_name(NEEDED) or next(filter(None, map(_other_arguments, ARGUMENTS)), None)


def _other_arguments(method: tuple[str, str, str, tuple[str, ...]]) -> str | None:
    """What a method of this vLLM takes, if that is not what our sampler gives it."""
    module, owner, name, known = method
    found = getattr(getattr(importlib.import_module(module), owner, None), name, None)
    if found is None:
        return f"{module}.{owner} has no {name}"
    taken = tuple(inspect.signature(found).parameters)[1:]
    return None if taken == known else f"{owner}.{name} takes {', '.join(taken)}"


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
