# SPDX-License-Identifier: Apache-2.0
"""The groups of a session by the names that users give them.

Each submission is a group of its own for the rollout loop. Submissions of one name are a family: they draft from each
other and share length estimates. Within a family, groups with equal prompts share the prompt's KV.

Invariants
  1. Indices are dense within a family, in the order of submission.
  2. Of idle named families, the `MAX_IDLE` that ended last are kept for late members; families without a name, and
     those that were closed, go when their last group ends.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from seer.runs.prompts import EncodedPrompt
from seer.types import Group

MAX_IDLE = 4096
"""A few megabytes of names; drafts of a group that is not active are dropped by the draft server when it is full."""


@dataclass(slots=True)
class Family:
    """Submissions of one name."""

    id: int
    name: str | None
    num_members: int = 0
    """Requests that ever belonged to it."""
    num_active: int = 0
    """Groups with requests that have not ended."""
    is_closed: bool = False
    prompts: dict[tuple[int, ...], int] = field(default_factory=dict)
    """The first active group with each prompt."""


class Forgotten(NamedTuple):
    """What needs no longer be remembered."""

    families: Sequence[Family]
    prompts: Sequence[int]


class Families:
    """Makes groups of submissions and remembers which belong together."""

    def __init__(self) -> None:
        self._num_groups = 0
        self._named: dict[str, Family] = {}
        self._idle: OrderedDict[str, Family] = OrderedDict()
        self._family_of: dict[int, Family] = {}  # active group -> family
        self._num_left: dict[int, int] = {}  # active group -> requests that have not ended

    def enter(
        self,
        prompt: EncodedPrompt,
        seed: int,
        name: str | None,
        *,
        max_context_tokens: int | None = None,
        home: int | None = None,
    ) -> Group:
        """The group of a new submission; with turns, it has a limit of its context."""
        id = self._num_groups
        self._num_groups += 1
        family = self._named.get(name) if name is not None else None
        if family is None:
            family = Family(id, name)
            if name is not None:
                self._named[name] = family
        elif name is not None:
            self._idle.pop(name, None)
        group = Group(
            id=id,
            num_requests=prompt.n,
            num_prompt_tokens=len(prompt.token_ids),
            sampling=prompt.sampling,
            prompt=prompt.token_ids,
            seed=seed,
            key=name,
            family=family.id,
            same_prompt_as=family.prompts.setdefault(prompt.token_ids, id),
            first_index=family.num_members,
            has_turns=max_context_tokens is not None,
            max_context_tokens=max_context_tokens,
            home=home,
        )
        family.num_members += prompt.n
        family.num_active += 1
        self._family_of[id] = family
        self._num_left[id] = prompt.n
        return group

    def request_ended(self, group: Group) -> bool:
        """One of the group's requests has ended; whether it was the last."""
        self._num_left[group.id] -= 1
        return not self._num_left[group.id]

    def group_ended(self, group: Group) -> Forgotten:
        """The group's last request has ended; returns what goes with it."""
        del self._num_left[group.id]
        family = self._family_of.pop(group.id)
        family.num_active -= 1
        if family.num_active:
            return Forgotten((), ())
        prompts = tuple(family.prompts.values())
        family.prompts.clear()
        return Forgotten(self._families_that_go(family), prompts)

    def _families_that_go(self, idle: Family) -> Sequence[Family]:
        if idle.name is None:
            return (idle,)
        if idle.is_closed:
            return (self._named.pop(idle.name),)
        self._idle[idle.name] = idle
        return [self._named.pop(self._idle.popitem(last=False)[0]) for _ in range(len(self._idle) - MAX_IDLE)]

    def close(self, name: str) -> Family | None:
        """No more submissions of this name come; returns the family if it is idle, and so goes now."""
        family = self._named.get(name)
        if family is None:
            return None
        family.is_closed = True
        if self._idle.pop(name, None) is not None:
            return self._named.pop(name)
        return None
