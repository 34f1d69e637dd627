# SPDX-License-Identifier: Apache-2.0
"""Which prompts enter a run and when: all at once, by priority, or one for each that is still needed.

With `enough`, as many groups run as are still to be kept, and a dropped one is replaced by the next prompt. None is
started in addition and given up for a faster one, so which groups are kept does not depend on how long they take: the
result is on-policy.

Invariants
  1. A prompt enters at most once, and none is drawn from an iterator before it is needed.
  2. num_kept + num_open never exceeds `enough`, and is equal to it as long as there are prompts and nothing of a higher
     priority waits.
  3. A prompt enters after all that are of a higher priority and known by then; of a list, all are known.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence

from seer.runs.prompts import EncodedPrompt

Placed = tuple[int, EncodedPrompt]
"""A prompt and its position in the run."""


class GroupSupply:
    """The prompts that have not entered yet, and what became of those that have."""

    def __init__(self, prompts: Iterable[EncodedPrompt], *, enough: int | None = None) -> None:
        placed: Iterable[Placed] = enumerate(prompts)
        if isinstance(prompts, Sequence):
            placed = sorted(placed, key=lambda one: -one[1].prompt.priority)
        self._left: Iterator[Placed] = iter(placed)
        self._next: Placed | None = None  # drawn, and not entered yet
        self._is_exhausted = False
        self._enough = enough
        self._level: int | None = None
        """The priority of the newest that entered."""
        self.num_open = 0
        """Groups that have entered and are neither kept nor dropped."""
        self.num_kept = self.num_dropped = 0

    @property
    def is_over(self) -> bool:
        """Whether no prompt enters any more, whatever becomes of the open groups."""
        return self._is_exhausted or self.num_kept == self._enough

    @property
    def holds_back(self) -> bool:
        """Whether the next prompt waits until nothing of a higher priority does."""
        return self._next is not None and self._level is not None and self._next[1].prompt.priority < self._level

    def take(self, *, nothing_waits: bool) -> list[Placed]:
        """The prompts that enter now; `nothing_waits` says that all that entered before have been started."""
        taken: list[Placed] = []
        while self._is_needed() and (one := self._peek()) is not None:
            if self.holds_back and (taken or not nothing_waits):
                break
            self._level = one[1].prompt.priority
            taken.append(one)
            self.num_open += 1
            self._next = None
        return taken

    def settle(self, *, is_kept: bool) -> None:
        """A group is whole, and was kept or dropped."""
        self.num_open -= 1
        self.num_kept += is_kept
        self.num_dropped += not is_kept

    def _peek(self) -> Placed | None:
        """The next prompt; drawn only when one is needed."""
        if self._next is None:
            self._next = next(self._left, None)
            self._is_exhausted = self._next is None
        return self._next

    def _is_needed(self) -> bool:
        return self._enough is None or self.num_kept + self.num_open < self._enough
