# SPDX-License-Identifier: Apache-2.0
"""A rollout's settings, read from the trainer's. What Seer cannot do is refused by the setting's name.

Invariants
  1. A rollout samples exactly as the trainer's configuration says, or does not start: nothing is ignored.
  2. A response stops at the trainer's end tokens and at no other.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal

from seer.errors import ConfigError
from seer.types import Sampling

Mode = Literal["train", "eval"]

_GENERATION_KWARGS = ("temperature", "top_p", "top_k", "min_p", "min_new_tokens")


@dataclass(frozen=True, slots=True)
class RolloutSettings:
    """One rollout as the trainer wants it."""

    mode: Mode
    sampling: Sampling
    group_size: int
    """Responses to each prompt."""
    seed: int
    step: int
    """Optimizer steps made so far."""


def read_settings(trainer: Any) -> RolloutSettings:
    """The settings of the rollout that the trainer asks for now."""
    refuse_unsupported(trainer)
    mode: Mode = "train" if trainer.model.training else "eval"
    changed = dict(trainer.args.generation_kwargs or {})
    return RolloutSettings(
        mode=mode,
        sampling=_sampling(trainer, changed),
        group_size=trainer.num_generations if mode == "train" else trainer.num_generations_eval,
        seed=trainer.args.seed,
        step=trainer.state.global_step,
    )


def refuse_unsupported(trainer: Any) -> None:
    """Refuse the first setting that Seer does not support."""
    args = trainer.args
    unknown = sorted(set(args.generation_kwargs or {}) - set(_GENERATION_KWARGS))
    refusals: tuple[tuple[bool, str, str], ...] = (
        (
            bool(args.use_vllm),
            "use_vllm=True would start an engine of TRL's own beside Seer's",
            "leave use_vllm out; seer_rollouts(engine='vllm') generates with vLLM",
        ),
        (
            args.repetition_penalty not in (None, 1.0),
            f"repetition_penalty={args.repetition_penalty} is not supported",
            "use 1.0: the trainer's own log-probabilities know no penalty either",
        ),
        (
            bool(unknown),
            f"generation_kwargs[{', '.join(map(repr, unknown))}] is not supported",
            f"supported are {', '.join(_GENERATION_KWARGS)}",
        ),
        (bool(trainer.tools), "tools (and environments) are not supported", "train without tools"),
        (trainer.temperature <= 0, f"temperature={trainer.temperature} samples nothing", "use a temperature above 0"),
        (bool(getattr(trainer, "_is_vlm", False)), "vision-language models are not supported", "use a text model"),
    )
    for applies, what, hint in refusals:
        if applies:
            raise ConfigError(f"GRPOConfig: {what}", hint=hint)


def _sampling(trainer: Any, changed: dict[str, Any]) -> Sampling:
    top_k = changed.get("top_k", trainer.top_k)
    min_p = changed.get("min_p", trainer.min_p)
    return Sampling(
        max_tokens=trainer.max_completion_length,
        temperature=changed.get("temperature", trainer.temperature),
        top_p=changed.get("top_p", trainer.top_p),
        top_k=top_k if top_k else None,  # TRL: 0 is off
        min_p=min_p if min_p is not None else 0.0,
        min_tokens=changed.get("min_new_tokens", 0),
        stop_token_ids=tuple(trainer.eos_token_ids),
        ignore_eos=True,  # the trainer's end tokens are given above, and are all there are
    )
