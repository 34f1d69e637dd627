"""Drafts inside an instance's process: the drafter over a draft client, and the budget that prices them.

The engine asks `budget` how much to draft, `draft` for the drafts, and tells `observe` what became final.
Seeing both the drafts and what followed, this is also where acceptance is measured, node by node.

Invariants
  1. Nothing here waits: the draft client does its talking in a thread of its own.
  2. Groups of two runs never share an index: their names carry the run. What `recall` brings along is all they know.
  3. What was observed is in the index before the next draft, and within HOLD_S while the engine steps; an engine that
     waits for its device has it learned meanwhile.
  4. Where measured step costs and acceptance say that drafting does not pay, nothing is drafted but for the trials
     that keep the measurement alive (`seer.speculation.choice`).
"""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import chain
from typing import Literal

import numpy as np

from seer.drafting.client import ClientConfig, DraftClient
from seer.drafting.index import DraftOptions
from seer.engine.drafter import Allowance, DraftAsk, DraftTree, StepReport
from seer.engine.step_cost import MeasuredCost
from seer.speculation.acceptance import AcceptanceTracker
from seer.speculation.budget import MAX_DEPTH
from seer.speculation.choice import DepthChoice

Drafts = Literal["none", "own", "grouped"]

HOLD_S = 0.02
"""Tokens wait this long for others to be learned with them: learning a token by itself costs a thousand times what it
costs among many, which shows where steps take two milliseconds and draft nothing."""
MIN_PLAIN_REPORTS = 2
"""Before anything is drafted: drafts are priced against steps without them."""
FIRST_DEPTH = 2
"""Drafted once those are known, until it is known what drafting costs."""


@dataclass(slots=True)
class _Held:
    """Tokens of a request that the index does not have yet."""

    group: str
    start: int
    tokens: list[int]


@dataclass(frozen=True, slots=True)
class _Offered:
    """A request's newest draft; without parents it is a line."""

    num_allowed: int
    tokens: Sequence[int]
    parents: Sequence[int | None] | None

    def accepted(self, tokens: Sequence[int]) -> Sequence[int]:
        """The nodes that these tokens, which followed, went through."""
        if self.parents is None:
            return range(_num_equal(self.tokens, tokens))
        nodes: list[int] = []
        at: int | None = None
        for node, parent in enumerate(self.parents):  # parents first, and siblings differ: one pass finds the way
            if parent == at and self.tokens[node] == tokens[len(nodes)]:
                nodes.append(node)
                if len(nodes) == len(tokens):
                    break
                at = node
        return nodes


class GroupedDrafter:
    """Implements `seer.engine.drafter.Drafter` over the group's suffix index."""

    def __init__(self, servers: tuple[str, ...], secret: bytes | None) -> None:
        self._servers = servers
        self._secret = secret
        self._client = DraftClient(ClientConfig(servers=servers, secret=secret))
        self._run = ""
        self.mode: Drafts = "none"
        self.acceptance = AcceptanceTracker()
        self._offered: dict[int, _Offered] = {}  # by request
        self._held: dict[int, _Held] = {}  # by request
        self._held_since_s = 0.0
        self.draft_s = 0.0
        """Seconds the newest batch of drafts took to make."""

    def begin_run(self, run: str, mode: Drafts, epoch: int) -> None:
        """Start from an empty memory: what another run said is not known to this one."""
        self._client.close()
        self._client = DraftClient(ClientConfig(servers=self._servers, secret=self._secret, epoch=epoch))
        self._run, self.mode = run, mode
        self.acceptance = AcceptanceTracker()
        self._offered.clear()
        self._held.clear()

    def recall(self, past: Mapping[int, Sequence[Sequence[int]]]) -> None:
        """Draft from what an earlier epoch said to these groups' prompts, until they have more to say themselves."""
        for group, responses in past.items():
            for number, tokens in enumerate(responses):
                name = f"{self._run}/past/{group}/{number}"
                self._client.observe(f"{self._run}/{group}", name, tokens, previous_count=0)

    def observe(self, group: int, request: int, tokens: Sequence[int], *, start: int) -> None:
        """Learn final tokens, and what became of the draft that preceded them."""
        if self.mode == "none":
            return
        offered = self._offered.pop(request, None)
        if offered is not None and tokens:
            self.acceptance.observe(offered.num_allowed, offered.accepted(tokens))
        self._hold(group, request, tokens, start)

    def draft(self, asks: Sequence[DraftAsk]) -> Sequence[DraftTree]:
        """One tree per ask."""
        if self.mode == "none":
            return [DraftTree()] * len(asks)
        began_s = time.perf_counter()
        self.learn()
        paths = max((ask.max_paths for ask in asks), default=1)
        batch = self._client.draft(
            [(self._name(ask.group, ask.request), f"{self._run}/{ask.request}") for ask in asks],
            [ask.max_tokens for ask in asks],
            options=DraftOptions(paths=paths),
        )
        trees = []
        rows = (array.tolist() for array in batch)  # at once: an array of a few values costs more than the values
        for ask, tokens, parents, confidence, count in zip(asks, *rows, strict=True):
            ways = [None if parent < 0 else parent for parent in parents[:count]]
            tree = DraftTree(tokens[:count], ways, confidence[:count])
            self._offer(ask.request, ask.max_tokens, tree.tokens, ways)
            trees.append(tree)
        self.draft_s = time.perf_counter() - began_s
        return trees

    def forget(self, request: int) -> None:
        """The request left; its tokens go on serving its siblings."""
        self._offered.pop(request, None)
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

    def _offer(
        self, request: int, num_allowed: int, tokens: Sequence[int], parents: Sequence[int | None] | None = None
    ) -> None:
        self._offered[request] = _Offered(num_allowed, tokens, parents)

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

    def _name(self, group: int, request: int) -> str:
        # Plain speculation looks at the request's own words only: a group of one.
        return f"{self._run}/{group}" if self.mode == "grouped" else f"{self._run}/own/{request}"


def _num_equal(one: Sequence[int], other: Sequence[int]) -> int:
    count = 0
    for mine, its in zip(one, other, strict=False):
        if mine != its:
            break
        count += 1
    return count


class MeasuredBudget:
    """A draft budget from what steps have been measured to cost. Implements `DraftBudget`."""

    def __init__(self, drafter: GroupedDrafter, *, only_depth: int | None = None, max_paths: int = 1) -> None:
        self._drafter = drafter
        self._max_paths = max_paths
        """Of a tree of as many tokens as the budget allows."""
        self._depths = range(MAX_DEPTH + 1) if only_depth is None else (0, only_depth)
        """One besides none for engines whose steps cost the same whatever part of it is drafted."""
        self._first_depth = only_depth or FIRST_DEPTH
        self._cost = MeasuredCost()
        self._choice = DepthChoice(self._depths)

    def __call__(self, num_running: int, mean_context_tokens: int) -> Allowance:
        """How much each request of the next step may draft."""
        if self._drafter.mode == "none" or self._cost.num_plain < MIN_PLAIN_REPORTS:
            return Allowance(0)
        if not self._cost.num_drafting:
            return Allowance(self._first_depth, self._max_paths)
        survival = self._drafter.acceptance.survival()
        return Allowance(self._choice.depth(self._cost, num_running, survival), self._max_paths)

    def on_step(self, report: StepReport) -> None:
        """Learn what a step cost."""
        self._cost.learn(report)
        if not report.num_allowed:
            self._choice.burst_steps = report.num_steps


__all__ = ["Drafts", "GroupedDrafter", "MeasuredBudget"]
