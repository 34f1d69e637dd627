# SPDX-License-Identifier: Apache-2.0
"""The KV memory of a simulated instance, counted in tokens.

It holds KV of three kinds: running requests (the instance tracks their growth), prompts that siblings share, and
resting requests. A request rests when its chunk has ended: its KV stays until the room is needed, and the request that
has rested longest is dropped first.

Invariants
  1. Resting KV never keeps a request from running: it is dropped first.
  2. A prompt shared by several requests of a group is counted once.
"""

from __future__ import annotations

from collections import OrderedDict

from seer.types import Chunk


class KVMemory:
    """Shared prompts and resting requests of one instance."""

    def __init__(self, num_tokens: int) -> None:
        self.num_tokens = num_tokens
        self.shared_tokens = 0.0
        """Prompt tokens counted more than once in the sum of the contexts; subtracted from it."""
        self.resting_tokens = 0
        self._members: dict[int, int] = {}  # group -> members with KV here
        self._resting: OrderedDict[int, int] = OrderedDict()  # request -> tokens

    def holds_group(self, group: int) -> bool:
        """Whether a request of the group, and so its prompt, has KV here."""
        return group in self._members

    def add_member(self, chunk: Chunk) -> None:
        """Count a request of the group whose KV is here."""
        members = self._members.get(chunk.group, 0)
        self._members[chunk.group] = members + 1
        if members:
            self.shared_tokens += chunk.num_prompt_tokens

    def drop_member(self, chunk: Chunk) -> None:
        """Its KV is no longer here."""
        members = self._members[chunk.group] - 1
        if members:
            self._members[chunk.group] = members
            self.shared_tokens -= chunk.num_prompt_tokens
        else:
            del self._members[chunk.group]

    def resting(self, request: int) -> int:
        """Tokens of a resting request; 0 if it does not rest here."""
        return self._resting.get(request, 0)

    def rest(self, request: int, num_tokens: int) -> None:
        """Keep a request's KV until the room is needed."""
        self._resting[request] = num_tokens
        self.resting_tokens += num_tokens

    def wake(self, request: int) -> int:
        """Remove a request from those that rest; return its tokens, 0 if it was dropped."""
        num_tokens = self._resting.pop(request, 0)
        self.resting_tokens -= num_tokens
        return num_tokens

    def forget(self) -> None:
        """Drop all resting KV."""
        self._resting.clear()
        self.resting_tokens = 0

    def make_room(self, used_tokens: float, num_tokens: float) -> bool:
        """Drop resting KV, oldest first, until `num_tokens` more fit; False if they cannot fit."""
        free = self.num_tokens - used_tokens
        if free < num_tokens:
            return False
        while self._resting and free - self.resting_tokens < num_tokens:
            self.resting_tokens -= self._resting.popitem(last=False)[1]
        return True
