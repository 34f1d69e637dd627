"""What earlier epochs taught of each prompt: how long its responses are and, if asked for, what they said.

Lengths serve as first estimates until a response of the new weights version has ended; words serve as drafts, which the
engine verifies. Neither changes a token that is sampled.

Invariants
  1. A prompt is remembered as of its newest weights version only.
  2. Memory is bounded: the prompts not seen for longest are forgotten.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from seer.types import GroupResult

MAX_PROMPTS = 100_000
MAX_PAST_RESPONSES = 4
"""Of a prompt's responses, those kept for drafts: the next ones resemble some of them, and more cost memory."""


@dataclass(frozen=True, slots=True)
class _Memory:
    longest_tokens: int
    responses: tuple[tuple[int, ...], ...]


class PromptMemory:
    """Remembers prompts by key."""

    def __init__(self, *, lengths: bool = True, words: bool = False) -> None:
        self._keeps_lengths = lengths
        self._keeps_words = words
        self._prompts: OrderedDict[str, _Memory] = OrderedDict()

    def learn(self, key: str, group: GroupResult) -> None:
        """Take in a prompt's responses; what was known of it before is replaced."""
        if not (self._keeps_lengths or self._keeps_words):
            return
        responses: tuple[tuple[int, ...], ...] = ()
        if self._keeps_words:
            by_length = sorted(group.responses, key=lambda response: (-response.num_tokens, response.index))
            # Evenly over the lengths, the longest included: it is what the others are waited with.
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

    def words(self, keys: Iterable[str]) -> dict[str, Sequence[Sequence[int]]]:
        """Responses to each prompt that is remembered."""
        if not self._keeps_words:
            return {}
        return {key: self._prompts[key].responses for key in keys if key in self._prompts}
