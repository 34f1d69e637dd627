# SPDX-License-Identifier: Apache-2.0
"""Tokens of siblings that this engine does not run: on other instances, or of an earlier epoch.

Runs in the process of vLLM's scheduler, with a thread of its own. The thread sends the draft servers what this engine's
requests generated, and collects what they have of the same groups. The scheduler takes what was collected with its next
step and sends it to the workers, all of which therefore draft alike.

Invariants
  1. `track` and `take` never wait: the thread alone talks to the draft client.
  2. Tokens of a request that runs here are not sent to the workers: they have them.
  3. A tail continues where the last one of its stream ended; the first begins at 0.
  4. One `take` hands out TAKE_TOKENS tokens at most, so that no step waits long for its copy.
  5. A group that has ended takes no memory: the next request names it, and the thread drops it here and on its server.
"""

from __future__ import annotations

import logging
import threading
from collections import deque
from collections.abc import Hashable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, NamedTuple

import numpy as np
from numpy.typing import NDArray

from seer.drafting.client import ClientConfig, DraftClient
from seer.drafting.curve_keys import ClientKeys
from seer.drafting.ids import number_of

if TYPE_CHECKING:
    from vllm.v1.request import Request

    from seer.engine.vllm.chunk_facts import ChunkFacts

log = logging.getLogger(__name__)

SIBLINGS = "seer_siblings"
"""Attribute of a scheduler output that carries tails to the workers."""
EXCHANGE_S = 0.05
"""Between two exchanges. Lockstep siblings accept 4% less when tokens arrive 64 steps late."""
TAKE_TOKENS = 1 << 16


class Tail(NamedTuple):
    """Tokens of a sibling, from its `start`th on."""

    group: Hashable
    stream: int
    start: int
    tokens: NDArray[np.int32]
    max_tokens: int
    """Most tokens its response can have."""


@dataclass(slots=True)
class _Running:
    request: Request
    group: int
    stream: str
    num_prompt_tokens: int
    num_known: int
    max_tokens: int


class Siblings:
    """Exchanges tokens of the groups that run here with the draft servers."""

    def __init__(self, servers: Sequence[str], keys: ClientKeys | None, max_model_len: int) -> None:
        self._servers, self._keys, self._max_model_len = tuple(servers), keys, max_model_len
        self._client = DraftClient()
        self._run: tuple[str, int] | None = None
        self._running: dict[str, _Running] = {}
        self._arrived: deque[tuple[_Running, ChunkFacts]] = deque()
        self._handed: dict[tuple[int, int], int] = {}  # (group, stream) -> tokens the workers have of it
        self._tails: deque[Tail] = deque()
        self._closing = threading.Event()
        self._thread = threading.Thread(target=self._work, name="seer-siblings", daemon=True)

    def start(self) -> None:
        """Begin to exchange."""
        self._thread.start()

    def track(self, request: Request, facts: ChunkFacts) -> None:
        """A chunk arrived."""
        one = _Running(
            request,
            facts.group,
            f"{facts.run}/{facts.request}",
            facts.num_prompt_tokens,
            facts.num_prompt_tokens,
            # `max_left` counts from the chunk's beginning, whose response so far is part of vLLM's prompt.
            min(facts.max_left + request.num_prompt_tokens, self._max_model_len) - facts.num_prompt_tokens,
        )
        self._arrived.append((one, facts))

    def take(self) -> list[Tail]:
        """What has been collected since the last call, as far as one step may carry it."""
        taken, num_tokens = [], 0
        while self._tails and num_tokens < TAKE_TOKENS:
            taken.append(self._tails.popleft())
            num_tokens += len(taken[-1].tokens)
        return taken

    def exchange(self) -> None:
        """Send what is new here, and collect what is new elsewhere. Called by the thread; by tests without one."""
        while self._arrived:
            one, facts = self._arrived.popleft()
            if (facts.run, facts.weights_version) != self._run:
                self._begin_run(facts.run, facts.weights_version)
            self._drop(facts.ended_groups)
            self._running[one.request.request_id] = one
        self._send()
        self._collect()

    def close(self) -> None:
        """Stop the thread."""
        self._closing.set()
        if self._thread.is_alive():
            self._thread.join()
        self._client.close()

    def _work(self) -> None:
        while not self._closing.wait(EXCHANGE_S):
            try:
                self.exchange()
            except Exception:
                # Drafts go on from what runs here.
                log.exception("no more tokens of siblings on other instances")
                return

    def _begin_run(self, run: str, weights_version: int) -> None:
        self._run = (run, weights_version)
        self._client.close()
        self._client = DraftClient(
            ClientConfig(servers=self._servers, keys=self._keys, weights_version=weights_version)
        )
        self._running.clear()
        self._handed.clear()
        self._tails.clear()

    def _drop(self, groups: Sequence[int]) -> None:
        if not groups:
            return
        assert self._run is not None, "requests carry their run"
        for group in groups:
            self._client.drop(f"{self._run[0]}/{group}")
        ended = frozenset(groups)
        self._handed = {key: count for key, count in self._handed.items() if key[0] not in ended}

    def _send(self) -> None:
        grown = []
        for name, one in list(self._running.items()):
            is_finished = one.request.is_finished()  # read first: what it had by then is read below
            tokens = one.request.all_token_ids[one.num_known : one.request.num_tokens]
            if tokens:
                grown.append((one, one.num_known - one.num_prompt_tokens, tokens))
                one.num_known += len(tokens)
            if is_finished:
                del self._running[name]
                # The workers have all of it; what another instance adds begins behind.
                self._handed.setdefault((one.group, number_of(one.stream)), one.num_known - one.num_prompt_tokens)
        if grown:
            assert self._run is not None, "requests carry their run"
            self._client.observe_batch(
                [(f"{self._run[0]}/{one.group}", one.stream) for one, _, _ in grown],
                np.fromiter((token for _, _, tokens in grown for token in tokens), np.int32),
                np.cumsum([0, *(len(tokens) for _, _, tokens in grown)], dtype=np.int64),
                previous_counts=[start for _, start, _ in grown],
            )

    def _collect(self) -> None:
        here = {number_of(one.stream) for one in self._running.values()}
        limits = {one.group: one.max_tokens for one in self._running.values()}
        index = self._client.index
        for group, max_tokens in limits.items():
            assert self._run is not None, "requests carry their run"
            number = number_of(f"{self._run[0]}/{group}")
            for stream in index.requests(number):
                handed = self._handed.get((group, stream), 0)
                if stream not in here and index.length(number, stream) > handed:
                    tokens = index.tokens(number, stream, handed)
                    self._tails.append(Tail(group, stream, handed, tokens, max_tokens))
                    self._handed[group, stream] = handed + len(tokens)
