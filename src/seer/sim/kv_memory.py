"""The KV memory of a simulated instance, counted in tokens.

Three kinds of tenants: running requests (whose growth the instance tracks), the prompts that siblings share, and
resting requests, whose chunk has ended and whose KV stays until the room is needed, least recently used first out.

Invariants
  1. Resting KV never keeps a running request out: it is dropped first.
  2. A prompt shared by several members is counted once.
"""

from __future__ import annotations

from collections import OrderedDict

from seer.types import Chunk


class KVMemory:
    """Who holds KV beside the running requests' own."""

    def __init__(self, num_tokens: int) -> None:
        self.num_tokens = num_tokens
        self.shared_tokens = 0.0
        """Prompt tokens that members would hold twice; to be taken off the sum of their contexts."""
        self.resting_tokens = 0
        self._members: dict[int, int] = {}  # group -> members with KV here
        self._resting: OrderedDict[int, int] = OrderedDict()  # request -> tokens

    def holds_group(self, group: int) -> bool:
        """Whether a member's KV, and with it the prompt's, is here."""
        return group in self._members

    def add_member(self, chunk: Chunk) -> None:
        """A request of the group has its KV here."""
        members = self._members.get(chunk.group, 0)
        self._members[chunk.group] = members + 1
        if members:
            self.shared_tokens += chunk.num_prompt_tokens

    def drop_member(self, chunk: Chunk) -> None:
        """It has it no longer."""
        members = self._members[chunk.group] - 1
        if members:
            self._members[chunk.group] = members
            self.shared_tokens -= chunk.num_prompt_tokens
        else:
            del self._members[chunk.group]

    def resting(self, request: int) -> int:
        """Tokens of a request whose chunk has ended."""
        return self._resting.get(request, 0)

    def rest(self, request: int, num_tokens: int) -> None:
        """Keep a request's KV as long as nobody needs the room."""
        self._resting[request] = num_tokens
        self.resting_tokens += num_tokens

    def wake(self, request: int) -> int:
        """Take the resting KV of a request over; 0 if there is none."""
        num_tokens = self._resting.pop(request, 0)
        self.resting_tokens -= num_tokens
        return num_tokens

    def forget(self) -> None:
        """Drop all that rests."""
        self._resting.clear()
        self.resting_tokens = 0

    def make_room(self, used_tokens: float, num_tokens: float) -> bool:
        """Drop resting KV, oldest first, until this many more tokens fit beside those used; False if they cannot."""
        free = self.num_tokens - used_tokens
        if free < num_tokens:
            return False
        while self._resting and free - self.resting_tokens < num_tokens:
            self.resting_tokens -= self._resting.popitem(last=False)[1]
        return True
