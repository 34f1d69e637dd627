# SPDX-License-Identifier: Apache-2.0
"""The KV that moves between one simulated instance and the pool: what a chunk lacks comes, what it has made goes.

Without tiers the pool's DRAM holds everything. Without a network every transfer has the bandwidth of the instance's own
cards, so the time at which KV arrives is known when it leaves; with one, other transfers decide it, and it is told.

Invariants
  1. A chunk whose KV is on its way waits here and nowhere else; those whose KV arrives earlier overtake it.
  2. What has come is loaded once: a chunk that is preempted later computes its KV.
"""

from __future__ import annotations

import asyncio
import heapq
import math
from collections.abc import Callable, Iterator

from seer.sim.chunk_run import ChunkRun
from seer.sim.costs import InstanceCost
from seer.sim.network import ClusterNetwork
from seer.sim.pool_tiers import PoolTiers


class PoolMoves:
    """Of one instance."""

    def __init__(
        self, instance: int, cost: InstanceCost, tiers: PoolTiers | None, network: ClusterNetwork | None
    ) -> None:
        self._instance = instance
        self._cost = cost
        self._tiers = tiers
        self._network = network
        self._coming: list[tuple[float, int, ChunkRun]] = []  # heap by the time of arrival

    def __len__(self) -> int:
        return len(self._coming)

    @property
    def node_name(self) -> str | None:
        """The instance's node, where there is a network between them."""
        return self._network.node_name(self._instance) if self._network is not None else None

    def prefetch(self, request: int, now_s: float) -> None:
        """Read the request's KV from SSD, if it is there."""
        if self._tiers is not None:
            self._tiers.prefetch(request, now_s)

    def load(self, run: ChunkRun, now_s: float, *, num_held: int, rests: bool, on_arrival: Callable[[], None]) -> bool:
        """Let the KV come that the chunk lacks; False if the pool has none.

        `rests`: what the request has, it has here. `on_arrival` is called when KV has come whose time was not known.
        """
        chunk = run.chunk
        if not chunk.load_kv:
            return False
        from_ssd_s = 0.0 if self._tiers is None or rests else self._tiers.load_s(chunk.request, now_s)
        if from_ssd_s is None:  # the pool has dropped it
            return False
        missing = max(0, chunk.num_context_tokens - chunk.num_fresh_tokens - num_held)
        if self._network is None:
            run.ready_s = now_s + from_ssd_s + self._cost.transfer_s(missing)
        else:
            run.ready_s = math.inf
            run.num_loading = self._network.load(
                chunk, self._instance, num_held, missing, lambda: self._arrived(run, on_arrival)
            )
        heapq.heappush(self._coming, (run.ready_s, chunk.request, run))
        return True

    def next_s(self) -> float:
        """When the next KV arrives, as far as that is known."""
        return self._coming[0][0] if self._coming else math.inf

    def take_arrived(self, now_s: float) -> Iterator[ChunkRun]:
        """The chunks whose KV has come, in the order of its arrival."""
        while self._coming and self._coming[0][0] <= now_s:
            yield heapq.heappop(self._coming)[2]

    def runs(self) -> list[ChunkRun]:
        """The chunks whose KV is on its way."""
        return [run for _, _, run in self._coming]

    def remove(self, run: ChunkRun) -> bool:
        """Take a chunk out before its KV has come; False if it is not here."""
        left = [entry for entry in self._coming if entry[2] is not run]
        was_here = len(left) < len(self._coming)
        self._coming = left
        heapq.heapify(self._coming)
        return was_here

    def take_loaded(self, run: ChunkRun, num_missing: int) -> int:
        """How many of the tokens that the instance lacks came from the pool."""
        if not run.ready_s:
            return 0
        run.ready_s = 0.0
        return num_missing if run.num_loading is None else min(num_missing, run.num_loading)

    def computed(self, num_held: int, num_tokens: int) -> None:
        """The instance computes so many tokens after so many."""
        if self._network is not None:
            self._network.computed(num_held, num_tokens)

    def save(self, run: ChunkRun, produced: int) -> None:
        """The chunk has ended and its request goes on: the pool holds its KV."""
        request, num_tokens = run.chunk.request, run.chunk.num_context_tokens + produced
        if self._tiers is not None:
            self._tiers.save(request, num_tokens)
        if self._network is not None:
            self._network.save(request, self._instance, num_tokens, produced, run.began_s)

    def free(self, run: ChunkRun, produced: int) -> None:
        """The request has ended with this chunk."""
        if self._tiers is not None:
            self._tiers.free(run.chunk.request)
        if self._network is not None:
            self._network.free(run.chunk.request, self._instance, produced, run.began_s)

    def _arrived(self, run: ChunkRun, on_arrival: Callable[[], None]) -> None:
        """Its KV has come over the network; nothing happens if it was removed since."""
        if self.remove(run):
            run.ready_s = asyncio.get_running_loop().time()
            heapq.heappush(self._coming, (run.ready_s, run.chunk.request, run))
            on_arrival()
