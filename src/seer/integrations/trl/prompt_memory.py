# SPDX-License-Identifier: Apache-2.0
"""What earlier epochs have shown of each prompt: the length of its responses and, if asked for, their tokens.

Lengths are first estimates until a response under the new weights has ended. Tokens are drafts, which the engine
verifies. Neither changes a token that is sampled.

Invariants
  1. Only a prompt's newest rollout is remembered.
  2. Memory is bounded: at `MAX_PROMPTS`, the prompt seen least recently is forgotten.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from seer.types import GroupResult

MAX_PROMPTS = 100_000
"""Bounds memory where a dataset is a stream."""
MAX_PAST_RESPONSES = 4
"""Responses of a prompt kept for drafts: new responses resemble some of them, and more would cost memory."""


@dataclass(frozen=True, slots=True)
class _Memory:
    longest_tokens: int
    responses: tuple[tuple[int, ...], ...]


class PromptMemory:
    """Remembers prompts by key."""

    def __init__(self, *, lengths: bool = True, responses: bool = False) -> None:
        self._keeps_lengths = lengths
        self._keeps_responses = responses
        self._prompts: OrderedDict[str, _Memory] = OrderedDict()

    def learn(self, key: str, group: GroupResult) -> None:
        """Remember a prompt's newest responses instead of earlier ones."""
        if not (self._keeps_lengths or self._keeps_responses):
            return
        responses: tuple[tuple[int, ...], ...] = ()
        if self._keeps_responses:
            by_length = sorted(group.responses, key=lambda response: (-response.num_tokens, response.index))
            # Evenly over the lengths, the longest included: it ends last, so drafts help it most.
            stride = max(1, len(by_length) // MAX_PAST_RESPONSES)
            responses = tuple(tuple(one.token_ids) for one in by_length[::stride][:MAX_PAST_RESPONSES])
        longest = max(response.num_tokens for response in group.responses)
        self._prompts[key] = _Memory(longest, responses)
        self._prompts.move_to_end(key)
        while len(self._prompts) > MAX_PROMPTS:
            self._prompts.popitem(last=False)

    def lengths(self, keys: Iterable[str]) -> dict[str, int]:
        """The longest response of each prompt that is remembered."""
        if not self._keeps_lengths:
            return {}
        return {key: self._prompts[key].longest_tokens for key in keys if key in self._prompts}

    def responses(self, keys: Iterable[str]) -> dict[str, Sequence[Sequence[int]]]:
        """Responses to each prompt that is remembered."""
        if not self._keeps_responses:
            return {}
        return {key: self._prompts[key].responses for key in keys if key in self._prompts}
