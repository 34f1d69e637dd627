# SPDX-License-Identifier: Apache-2.0
"""Drafts for the requests of one instance, from the responses of their groups.

The engine calls `draft` for drafts and `observe` with the tokens that became final. Acceptance is measured here, by
depth, because both are known here. How much to draft is decided in `live_budget`.

Invariants
  1. Nothing here waits: the draft client talks to the draft servers in its own thread.
  2. Groups of two runs never share an index: their names carry the run. A run starts with nothing but what `seed_from`
     gives it.
  3. A group that has ended takes no memory: `drop` removes it here and on its draft server.
  4. Observed tokens are in the index before the next draft. Without drafts they are indexed by the first `observe`
     after HOLD_S, when a request leaves, or when the engine calls `learn`.
"""

from __future__ import annotations

import time
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import chain
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from seer.drafting.base import DraftAsk, DraftSession, DraftTable, DraftTree
from seer.drafting.client import ClientConfig, DraftClient, RequestKey
from seer.drafting.curve_keys import ClientKeys
from seer.drafting.index import LINEAR, DraftOptions
from seer.drafting.index_session import IndexSession
from seer.speculation.acceptance import AcceptanceTracker
from seer.types import GROUP_DRAFTS, DraftMode

HOLD_S = 0.1
"""Observed tokens wait up to this long and are then indexed in one call. One call per token costs more than indexing
it. Drafts here do not wait for it, and siblings elsewhere get most tokens later than that."""

GROUP_TTL_S = 1800.0
"""Time to live of a group that no request has used here. A backstop: groups are dropped when they end. A request that
comes back later finds its siblings' tokens on the draft server."""


@dataclass(slots=True)
class _Held:
    """Tokens of a request that the index does not have yet."""

    group: str
    start: int
    tokens: list[int]


class _Newest(NamedTuple):
    """A request's newest draft."""

    max_tokens: int
    tree: DraftTree | None = None
    """None for a line."""

    def accepted(self, tokens: Sequence[int]) -> Iterable[int]:
        """The accepted nodes, given the tokens that followed. The last of those was sampled, not drafted."""
        if self.tree is None:
            return range(min(self.max_tokens, len(tokens) - 1))
        return _path(self.tree, tokens[:-1])


class LinearAsk(NamedTuple):
    """A request that could use a linear draft now."""

    group: int
    request: int
    max_tokens: int


class GroupedDrafter:
    """Implements `seer.drafting.base.Drafter` over the group's suffix index."""

    def __init__(self, servers: tuple[str, ...], keys: ClientKeys | None) -> None:
        self._servers = servers
        self._keys = keys
        self._client = DraftClient()  # `begin_run` makes the one that knows the servers
        self._run = ""
        self.mode: DraftMode = "none"
        self.acceptance = _fresh_acceptance()
        self._newest: dict[int, _Newest] = {}  # by request
        self._held: dict[int, _Held] = {}  # by request
        self._held_since_s = 0.0
        self._dropped: set[str] = set()  # names of groups that ended while tokens were held
        self._registered: dict[int, set[str]] = {}  # group -> names under which its tokens are indexed

    def begin_run(self, run: str, mode: DraftMode, weights_version: int) -> None:
        """Start with an empty index: responses of other runs are not drafted from."""
        self._client.close()
        # Without drafts nothing is exchanged, and a thread that looks for messages would take time from the engine.
        servers = () if mode == "none" else self._servers
        self._client = DraftClient(ClientConfig(servers=servers, keys=self._keys, weights_version=weights_version))
        self._run, self.mode = run, mode
        self.acceptance = _fresh_acceptance()
        self._newest.clear()
        self._held.clear()
        self._dropped.clear()
        self._registered.clear()

    def register(self, group: int, request: int, prompt: Sequence[int]) -> None:
        """A request of a group is here: follow its siblings, and draft from the prompt too."""
        if self.mode == "none":
            return
        name, names = self._name(group, request), self._registered.setdefault(group, set())
        if name not in names:
            names.add(name)
            self._client.register(name, GROUP_TTL_S, prompt=prompt)

    def drop(self, group: int) -> None:
        """All requests of a group have ended: forget it here and on its server. Any thread may call this."""
        names = self._registered.pop(group, set())
        if self.mode in GROUP_DRAFTS:
            names.add(self._name(group, 0))  # it may hold responses of an earlier epoch without having run here
        if self._held:
            self._dropped.update(names)  # in place: this may be another thread
        for name in names:
            self._client.drop(name)

    def seed_from(self, past: Mapping[int, Sequence[Sequence[int]]]) -> None:
        """Also draft from an earlier epoch's responses to the same prompts, given by group."""
        for group, responses in past.items():
            for number, tokens in enumerate(responses):
                name = f"{self._run}/past/{group}/{number}"
                self._client.observe(f"{self._run}/{group}", name, tokens, previous_count=0)

    def observe(self, group: int, request: int, tokens: Sequence[int], *, start: int) -> None:
        """Index final tokens, and count how many of the last draft were accepted."""
        if self.mode == "none":
            return
        newest = self._newest.pop(request, None)
        if newest is not None and newest.max_tokens:
            self.acceptance.observe(newest.max_tokens, newest.accepted(tokens))
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
        rows = (array.tolist() for array in batch)  # all at once: converting many small arrays costs more
        for ask, tokens, parents, confidence, count in zip(asks, *rows, strict=True):
            parent_ids = [None if parent < 0 else parent for parent in parents[:count]]
            trees.append(DraftTree(tokens[:count], parent_ids, confidence[:count]))
            self._newest[ask.request] = _Newest(ask.max_tokens, trees[-1])
        return trees

    def draft_linear(self, asks: Sequence[LinearAsk]) -> list[list[int]]:
        """The likeliest continuation of each request, as plain tokens; for engines that verify no trees."""
        if self.mode == "none":
            return [[] for _ in asks]
        self.learn()
        keys = [self._key(ask.group, ask.request) for ask in asks]
        batch = self._client.draft(keys, [ask.max_tokens for ask in asks], options=LINEAR)
        self._newest.update((ask.request, _Newest(ask.max_tokens)) for ask in asks)
        return [row[:count] for row, count in zip(batch.tokens.tolist(), batch.counts.tolist(), strict=True)]

    def open_session(self, asks: Sequence[DraftAsk]) -> DraftSession:
        """Draft for these requests over several steps."""
        assert self.mode != "none", "the budget allows no drafts in this mode"
        self.learn()
        keys = [self._key(ask.group, ask.request) for ask in asks]
        return _Session(self._client.open_session(keys), _options(asks), self.acceptance)

    def forget(self, request: int) -> None:
        """The request left this instance; its tokens stay in the index for its siblings."""
        self._newest.pop(request, None)
        self.learn()

    def learn(self) -> None:
        """Index all tokens that wait, in one call, but not those of groups that have ended."""
        if not self._held:
            return
        dropped, self._dropped = self._dropped, set()
        kept = {request: one for request, one in self._held.items() if one.group not in dropped}
        self._held.clear()
        if not kept:
            return
        held = list(kept.values())
        self._client.observe_batch(
            [(one.group, f"{self._run}/{request}") for request, one in kept.items()],
            np.fromiter(chain.from_iterable(one.tokens for one in held), np.int32),
            np.cumsum([0, *(len(one.tokens) for one in held)], dtype=np.int64),
            previous_counts=[one.start for one in held],
        )

    def close(self) -> None:
        """Stop the client's thread."""
        self.learn()
        self._client.close()

    def _hold(self, group: int, request: int, tokens: Sequence[int], start: int) -> None:
        now_s = time.perf_counter()
        if not self._held:
            self._held_since_s = now_s
        held = self._held.get(request)
        if held is not None and held.start + len(held.tokens) != start:  # it ran on another instance in between
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
        # In mode "own" a request drafts from its own tokens only: it is a group of one.
        return f"{self._run}/{group}" if self.mode != "own" else f"{self._run}/own/{request}"


class _Session:
    """Implements `DraftSession` over the index."""

    def __init__(self, index_session: IndexSession, options: DraftOptions, acceptance: AcceptanceTracker) -> None:
        self._index_session, self._options, self._acceptance = index_session, options, acceptance
        self.observe = index_session.observe

    def draft(self, limits: NDArray[np.int32]) -> DraftTable:
        batch = self._index_session.draft(limits, self._options)
        return DraftTable(batch.tokens, batch.parents, batch.counts)

    def close(self, tried: Sequence[int], taken: Sequence[int]) -> None:
        self._index_session.close()
        self._acceptance.observe_many(tried, taken)


def _path(tree: DraftTree, tokens: Sequence[int]) -> list[int]:
    """The nodes that spell these tokens, as far as there are any."""
    path: list[int] = []
    at: int | None = None
    for node, (token, parent) in enumerate(zip(tree.tokens, tree.parents, strict=True)):
        if len(path) < len(tokens) and parent == at and token == tokens[len(path)]:
            path.append(node)
            at = node
    return path


def _options(asks: Sequence[DraftAsk]) -> DraftOptions:
    return DraftOptions(paths=max((ask.max_paths for ask in asks), default=1))


def _fresh_acceptance() -> AcceptanceTracker:
    # A low prior with little weight: drafts start shallow, and a few accepted ones are enough to deepen them.
    return AcceptanceTracker(prior_acceptance=0.25, prior_weight=4.0)
