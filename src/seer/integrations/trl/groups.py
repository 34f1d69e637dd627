# SPDX-License-Identifier: Apache-2.0
"""Groups in the trainer's flat list of prompts, and their seeds, which make a resumed run repeat itself.

TRL passes each prompt once per response wanted, one after the other. Equal prompts in sequence are therefore one group,
or several where the dataset has the same prompt twice in sequence.

Invariants
  1. The groups cover the list, in order, each entry once.
  2. A group's seed depends on the trainer's seed, the step, the phase and the group's place only: neither on the
     number of ranks nor on what happened before a restart.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from seer.integrations.trl.rollout_settings import RolloutSettings


@dataclass(frozen=True, slots=True)
class PromptGroup:
    """Consecutive entries of the trainer's list that want responses to one prompt."""

    prompt: Any
    """Text, or a list of messages."""
    size: int
    key: str
    """Names the prompt across steps and epochs."""


def prompt_key(prompt: Any) -> str:
    """The same for equal prompts, in every process."""
    text = prompt if isinstance(prompt, str) else json.dumps(prompt, sort_keys=True, default=str)
    return hashlib.blake2b(text.encode(), digest_size=12).hexdigest()


def find_groups(prompts: Sequence[Any], group_size: int) -> list[PromptGroup]:
    """Equal prompts in sequence, cut into groups of at most `group_size`."""
    groups: list[PromptGroup] = []
    first = 0
    while first < len(prompts):
        size = 1
        while size < group_size and first + size < len(prompts) and prompts[first + size] == prompts[first]:
            size += 1
        groups.append(PromptGroup(prompts[first], size, prompt_key(prompts[first])))
        first += size
    return groups


def group_seed(settings: RolloutSettings, call: int, place: int) -> int:
    """The seed of one group; `call` counts the rollouts of this step, `place` the groups of this rollout."""
    name = f"{settings.seed}|{settings.mode}|{settings.step}|{call}|{place}"
    return int.from_bytes(hashlib.blake2b(name.encode(), digest_size=8).digest(), "little") >> 1
