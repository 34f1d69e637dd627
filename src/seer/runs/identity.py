# SPDX-License-Identifier: Apache-2.0
"""What makes two runs the same run: they ask for the same tokens of the same weights.

The scheduler, the number of instances and everything else that does not change tokens is no part of it.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from seer.errors import InputError
from seer.runs.journal_lines import JournalHeader, PastRequest
from seer.runs.prompts import EncodedPrompt
from seer.runs.weights_identity import weights_identity
from seer.types import FinishReason

_OTHER_HINT = "give the same arguments as the run that was interrupted, or leave --resume out"


@dataclass(frozen=True, slots=True, kw_only=True)
class RunIdentity:
    """One run, as its journal knows it."""

    settings: str
    """A hash of the engine, its type of numbers, the prompts, their sampling, the seeds and forced lengths."""
    weights: str
    """A hash of the weights (weights_identity.py)."""
    shape: tuple[tuple[int, int], ...] = ()
    """n and max_tokens of each prompt."""
    has_turns: bool = False
    """Whether responses talk to an environment; which one cannot be compared."""

    def refuse_other(self, header: JournalHeader, path: Path) -> None:
        """Refuse the journal of another run."""
        if header.settings != self.settings:
            raise InputError(
                f"{path} belongs to a run with another engine, prompts, sampling or seed", hint=_OTHER_HINT
            )
        if header.weights != self.weights:
            raise InputError(
                f"{path} belongs to a run with other weights: hash {header.weights}, got {self.weights}",
                hint="put the weights of that run back, or start a new run",
            )

    def refuse_impossible(self, past: Mapping[tuple[int, int], PastRequest], path: Path) -> None:
        """Refuse requests that this run does not have, and responses longer than it allows."""
        for (group, index), one in past.items():
            n, max_tokens = self.shape[group] if group < len(self.shape) else (0, 0)
            at_limit = one.num_generated == max_tokens or self.has_turns  # then the context may be full
            is_long = one.finish_reason is FinishReason.LENGTH
            if index >= n or one.num_generated > max_tokens or (is_long and not at_limit):
                raise InputError(
                    f"{path} holds {one.num_tokens} tokens of response {index} of prompt {group}, "
                    f"which has {n} responses of at most {max_tokens} tokens",
                    hint="the journal cannot be trusted: start a new run",
                )


def turns_identity(max_context_tokens: int | None, tools: Sequence[Mapping[str, Any]] | None) -> str:
    """What is known of an environment that decides tokens."""
    return f"{max_context_tokens} {tools}"


def run_identity(
    prompts: Sequence[EncodedPrompt],
    *,
    engine: str,
    dtype: str,
    weights: Path | None,
    seed: int,
    lengths: Sequence[Sequence[int]] | None = None,
    turns: str | None = None,
) -> RunIdentity:
    """The identity of a run; `weights` is the folder or file that its instances compute with.

    `turns` says what is known of its environment.
    """
    digest = hashlib.blake2b(digest_size=16)
    digest.update(f"{engine}|{dtype}|{seed}|{lengths and [list(row) for row in lengths]}".encode())
    if turns is not None:
        digest.update(f"|turns {turns}".encode())
    for prompt in prompts:
        digest.update(f"|{prompt.n}|{prompt.sampling}|{prompt.prompt.seed}|{prompt.token_ids}".encode())
    return RunIdentity(
        settings=digest.hexdigest(),
        weights=weights_identity(weights),
        shape=tuple((prompt.n, prompt.sampling.max_tokens) for prompt in prompts),
        has_turns=turns is not None,
    )
