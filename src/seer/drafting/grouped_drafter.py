"""Drafts inside an instance's process: the drafter over a draft client, and the budget that prices them.

The engine asks `budget` how much to draft, `draft` for the drafts, and tells `observe` what became final.
Seeing both the drafts and what index_session, this is also where acceptance is measured, depth by depth.

Invariants
  1. Nothing here waits: the draft client does its talking in a thread of its own.
  2. Groups of two runs never share an index: their names carry the run. What `seed_from` brings along is all they know.
  3. What was observed is in the index before the next draft, and within HOLD_S while the engine steps; an engine that
     waits for its device has it learned meanwhile, and one that is followed (`run_drafted`) step by step.
  4. Where measured step costs and acceptance say that drafting does not pay, nothing is drafted but for a
     small, regular trial that keeps the measurement alive.
"""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import chain
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from seer.drafting.base import DraftAsk, DraftSession, DraftTable, DraftTree
from seer.drafting.client import ClientConfig, DraftClient, RequestKey
from seer.drafting.index import LINEAR, DraftOptions
from seer.drafting.index_session import IndexSession
from seer.speculation.acceptance import AcceptanceTracker
from seer.types import DraftMode

HOLD_S = 0.02
"""Tokens wait this long for others to be learned with them: learning a token by itself costs a thousand times what it
costs among many, which shows where steps take two milliseconds and draft nothing."""


@dataclass(slots=True)
class _Held:
    """Tokens of a request that the index does not have yet."""

    group: str
    start: int
    tokens: list[int]


class LinearAsk(NamedTuple):
    """A request that could use a linear draft now."""

    group: int
    request: int
    max_tokens: int


class GroupedDrafter:
    """Implements `seer.drafting.base.Drafter` over the group's suffix index."""

    def __init__(self, servers: tuple[str, ...], secret: bytes | None) -> None:
        self._servers = servers
        self._secret = secret
        self._client = DraftClient(ClientConfig(servers=servers, secret=secret))
        self._run = ""
        self.mode: DraftMode = "none"
        self.acceptance = _fresh_acceptance()
        self._allowed: dict[int, int] = {}  # request -> tokens its newest draft might have had
        self._held: dict[int, _Held] = {}  # by request
        self._held_since_s = 0.0

    def begin_run(self, run: str, mode: DraftMode, weights_version: int) -> None:
        """Start from an empty memory: what another run said is not known to this one."""
        self._client.close()
        self._client = DraftClient(
            ClientConfig(servers=self._servers, secret=self._secret, weights_version=weights_version)
        )
        self._run, self.mode = run, mode
        self.acceptance = _fresh_acceptance()
        self._allowed.clear()
        self._held.clear()

    def seed_from(self, past: Mapping[int, Sequence[Sequence[int]]]) -> None:
        """Draft from what an earlier epoch said to these groups' prompts, until they have more to say themselves."""
        for group, responses in past.items():
            for number, tokens in enumerate(responses):
                name = f"{self._run}/past/{group}/{number}"
                self._client.observe(f"{self._run}/{group}", name, tokens, previous_count=0)

    def observe(self, group: int, request: int, tokens: Sequence[int], *, start: int) -> None:
        """Learn final tokens, and what became of the draft that preceded them."""
        if self.mode == "none":
            return
        allowed = self._allowed.pop(request, None)
        if allowed:
            self.acceptance.observe(allowed, min(allowed, len(tokens) - 1))  # the last token was sampled, not drafted
        self._hold(group, request, tokens, start)

    def draft(self, asks: Sequence[DraftAsk]) -> Sequence[DraftTree]:
        """One tree per ask."""
        if self.mode == "none":
            return [DraftTree()] * len(asks)
        self.learn()
        batch = self._client.draft(
            [self._key(ask.group, ask.request) for ask in asks],
            [ask.max_tokens for ask in asks],
            options=_options(asks),
        )
        trees = []
        rows = (array.tolist() for array in batch)  # at once: an array of a few values costs more than the values
        for ask, tokens, parents, confidence, count in zip(asks, *rows, strict=True):
            ways = [None if parent < 0 else parent for parent in parents[:count]]
            trees.append(DraftTree(tokens[:count], ways, confidence[:count]))
            self._allowed[ask.request] = ask.max_tokens
        return trees

    def draft_linear(self, asks: Sequence[LinearAsk]) -> list[list[int]]:
        """The likeliest continuation of each request, as plain tokens; for engines that verify no trees."""
        if self.mode == "none":
            return [[] for _ in asks]
        self.learn()
        keys = [self._key(ask.group, ask.request) for ask in asks]
        batch = self._client.draft(keys, [ask.max_tokens for ask in asks], options=LINEAR)
        self._allowed.update((ask.request, ask.max_tokens) for ask in asks)
        return [row[:count] for row, count in zip(batch.tokens.tolist(), batch.counts.tolist(), strict=True)]

    def open_session(self, asks: Sequence[DraftAsk]) -> DraftSession:
        """Go along with these requests for some steps."""
        assert self.mode != "none", "a budget allows nothing then"
        self.learn()
        keys = [self._key(ask.group, ask.request) for ask in asks]
        return _Session(self._client.open_session(keys), _options(asks), self.acceptance)

    def forget(self, request: int) -> None:
        """The request left; its tokens go on serving its siblings."""
        self._allowed.pop(request, None)
        self.learn()

    def learn(self) -> None:
        """Hand the client what is held, all at once."""
        if not self._held:
            return
        held = list(self._held.values())
        self._client.observe_batch(
            [(one.group, f"{self._run}/{request}") for request, one in self._held.items()],
            np.fromiter(chain.from_iterable(one.tokens for one in held), np.int32),
            np.cumsum([0, *(len(one.tokens) for one in held)], dtype=np.int64),
            previous_counts=[one.start for one in held],
        )
        self._held.clear()

    def close(self) -> None:
        """Stop the client's thread."""
        self.learn()
        self._client.close()

    def _hold(self, group: int, request: int, tokens: Sequence[int], start: int) -> None:
        now_s = time.perf_counter()
        if not self._held:
            self._held_since_s = now_s
        held = self._held.get(request)
        if held is not None and held.start + len(held.tokens) != start:  # it was elsewhere meanwhile
            self.learn()
            held = None
        if held is None:
            self._held[request] = _Held(self._name(group, request), start, list(tokens))
        else:
            held.tokens.extend(tokens)
        if now_s - self._held_since_s >= HOLD_S:
            self.learn()

    def _key(self, group: int, request: int) -> RequestKey:
        return self._name(group, request), f"{self._run}/{request}"

    def _name(self, group: int, request: int) -> str:
        # Plain speculation looks at the request's own words only: a group of one.
        return f"{self._run}/{group}" if self.mode == "grouped" else f"{self._run}/own/{request}"


class _Session:
    """Implements `DraftSession` over the client's streams."""

    def __init__(self, index_session: IndexSession, options: DraftOptions, acceptance: AcceptanceTracker) -> None:
        self._index_session, self._options, self._acceptance = index_session, options, acceptance
        self.observe = index_session.observe

    def draft(self, limits: NDArray[np.int32]) -> DraftTable:
        batch = self._index_session.draft(limits, self._options)
        return DraftTable(batch.tokens, batch.parents, batch.counts)

    def close(self, tried: Sequence[int], taken: Sequence[int]) -> None:
        self._index_session.close()
        self._acceptance.observe_many(tried, taken)


def _options(asks: Sequence[DraftAsk]) -> DraftOptions:
    return DraftOptions(paths=max((ask.max_paths for ask in asks), default=1))


def _fresh_acceptance() -> AcceptanceTracker:
    # Low and light: drafts have to earn their depth, and a few good ones are enough to do so.
    return AcceptanceTracker(prior_acceptance=0.25, prior_weight=4.0)
