# SPDX-License-Identifier: Apache-2.0
"""Is the policy that sampled the policy that is trained? The trainer scores a few responses of each rollout to check.

Both sides score the same tokens. Under the same weights the log-probabilities differ by rounding only. Weights that did
not arrive, a wrong chat template or a wrong temperature make a much larger difference. Means over tokens are compared,
because rounding alone can give an unlikely token a large gap.

    gap          |log p_trainer - log p_rollout| of a token
    mean ratio   mean of p_trainer / p_rollout; on policy it is 1 in expectation
"""

from __future__ import annotations

import contextlib
import itertools
import math
import warnings
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from seer.integrations.trl.ranks import tell_others
from seer.integrations.trl.sharding import is_sharded, model_of
from seer.types import Response, Sampling

SCORE = "score"
"""The duty of the other ranks in a check of a model that is spread over them."""

MAX_MEAN_GAP_FLOAT32 = 1e-3
"""Where both sides compute in float32. The noise was measured at 1e-7 on tiny models and 1e-5 on 135 M parameters."""
MAX_MEAN_GAP_LOW_PRECISION = 0.1
"""Anywhere else. SmolLM2 trained in bfloat16 against instances in float32 had a mean gap of 0.04, the weights equal."""


class OffPolicy(UserWarning):
    """The rollout's log-probabilities are not the trainer's."""


@dataclass(frozen=True, slots=True)
class OnPolicyNumbers:
    """The result of one check."""

    num_tokens: int
    mean_ratio: float
    mean_gap: float
    largest_gap: float
    limit: float
    """Of the mean gap."""

    @property
    def is_on_policy(self) -> bool:
        """Whether the mean gap is within its limit."""
        return self.mean_gap <= self.limit  # False for NaN

    def __str__(self) -> str:
        return (
            f"mean gap {self.mean_gap:.2g} (limit {self.limit:g}), largest gap {self.largest_gap:.2g}, "
            f"mean ratio {self.mean_ratio:.4f} over {self.num_tokens} tokens"
        )


class OnPolicyCheck:
    """Checks rollouts with one trainer."""

    def __init__(self, *, num_responses: int, max_mean_gap: float | None) -> None:
        self._num_responses = num_responses
        self._max_mean_gap = max_mean_gap

    def check(
        self,
        trainer: Any,
        prompts: Sequence[Sequence[int]],
        responses: Sequence[Response],
        sampling: Sampling,
        *,
        dtype: str,
        where: str,
    ) -> OnPolicyNumbers | None:
        """Compare a sample of the responses and warn if they are off policy; None where nothing can be compared.

        `dtype` is what the instances compute in.
        """
        if not self._num_responses:
            return None
        chosen = _spread(len(responses), self._num_responses)
        ours = [_comparable(responses[i], sampling) for i in chosen]
        if any(values is None for values in ours):
            return None
        rows = [prompts[i] for i in chosen], [responses[i].token_ids for i in chosen]
        if is_sharded(model_of(trainer)):
            tell_others(trainer, SCORE, *rows)
        theirs = _trainer_logprobs(trainer, *rows)
        rolled = [value for values in ours for value in values or ()]
        kept = [kept for i in chosen for kept in responses[i].loss_mask or [1] * len(responses[i].token_ids)]
        theirs, rolled = list(itertools.compress(theirs, kept)), list(itertools.compress(rolled, kept))
        numbers = _compare(theirs, rolled, self._limit(trainer, dtype))
        if not numbers.is_on_policy:
            warnings.warn(
                f"{where} is off policy: {numbers}; the instances do not hold the trainer's weights, or sample "
                "otherwise than the trainer scores",
                OffPolicy,
                stacklevel=2,
            )
        return numbers

    def _limit(self, trainer: Any, dtype: str) -> float:
        if self._max_mean_gap is not None:
            return self._max_mean_gap
        trained = str(next(iter(trainer.model.parameters())).dtype).removeprefix("torch.")
        is_exact = dtype == trained == "float32" and not (trainer.args.bf16 or trainer.args.fp16)
        return MAX_MEAN_GAP_FLOAT32 if is_exact else MAX_MEAN_GAP_LOW_PRECISION


def _spread(num_all: int, num_wanted: int) -> list[int]:
    """Positions spread evenly over the rollout."""
    wanted = min(num_all, num_wanted)
    return [place * num_all // wanted for place in range(wanted)]


def _comparable(response: Response, sampling: Sampling) -> Sequence[float] | None:
    """The log-probabilities that the trainer's own would equal: temperature applied, nothing cut."""
    is_cut = sampling.top_p < 1 or sampling.top_k is not None or sampling.min_p > 0 or sampling.min_tokens > 0
    if not is_cut:
        return response.logprobs
    return response.raw_logprobs if sampling.temperature == 1.0 else None


def score_too(trainer: Any, prompts: list[Sequence[int]], responses: list[list[int]]) -> None:
    """What other ranks do when the main rank scores: a model that is spread over ranks computes on all of them."""
    _trainer_logprobs(trainer, prompts, responses)


def _trainer_logprobs(trainer: Any, prompts: list[Sequence[int]], responses: list[list[int]]) -> list[float]:
    """The trainer's log-probabilities of the responses' tokens, in order."""
    import torch
    from trl.models.utils import disable_gradient_checkpointing

    device = trainer.accelerator.device
    pad = trainer.processing_class.pad_token_id or 0
    widest, longest = max(map(len, prompts)), max(map(len, responses))
    ids = torch.full((len(prompts), widest + longest), pad, dtype=torch.long)
    mask = torch.zeros_like(ids)
    for row, (prompt, response) in enumerate(zip(prompts, responses, strict=True)):
        span = slice(widest - len(prompt), widest + len(response))
        ids[row, span] = torch.tensor([*prompt, *response])
        mask[row, span] = 1
    without_checkpoints = disable_gradient_checkpointing(trainer.model, trainer.args.gradient_checkpointing_kwargs)
    with torch.no_grad(), without_checkpoints, _without_dropout(trainer.model):
        scored, _, _ = trainer._get_per_token_logps_and_entropies(
            trainer.model, ids.to(device), mask.to(device), longest, batch_size=trainer.args.per_device_train_batch_size
        )
    rows = scored.float().cpu()
    return [float(value) for row, response in zip(rows, responses, strict=True) for value in row[: len(response)]]


@contextlib.contextmanager
def _without_dropout(model: Any) -> Iterator[None]:
    """Rollouts have no dropout, so a gap that it makes says nothing about the weights; LoRA often has some."""
    training = [module for module in model.modules() if module.training]
    for module in training:
        module.training = False  # by itself: `eval` does more in some adapters, and would not know what to undo
    try:
        yield
    finally:
        for module in training:
            module.training = True


def _compare(trainer: Sequence[float], rollout: Sequence[float], limit: float) -> OnPolicyNumbers:
    assert len(trainer) == len(rollout), f"{len(trainer)} tokens scored, {len(rollout)} sampled"
    differences = [theirs - ours for theirs, ours in zip(trainer, rollout, strict=True)]
    num = len(differences)
    return OnPolicyNumbers(
        num_tokens=num,
        mean_ratio=sum(math.exp(min(one, 50.0)) for one in differences) / num,
        mean_gap=sum(map(abs, differences)) / num,
        largest_gap=max(map(abs, differences)),
        limit=limit,
    )
