# SPDX-License-Identifier: Apache-2.0
"""The network of a simulated cluster: nodes with a network card each, and a near tier of the pool in their memory.

The store between nodes spreads blocks evenly over the nodes, as Mooncake does. So a read is limited by the card of the
reader's node, and a save by the card of the writer's; the other ends are spread. Each direction of a card is shared by
the transfers under way there (shared_link.py). KV that the node holds comes from its memory, which is shared too.
A near tier holds everything; how long nodes keep KV in truth depends on their memory.

Engines save blocks as they fill. Here a chunk's KV goes into the idle time of the card while the chunk ran, and what
did not fit goes at its end, all at once. KV that is not saved when its request starts elsewhere is computed again.
Saves of prompts are left out. An instance with more GPUs than a node has the cards of all its nodes.

Costs are learned as in production (seer.transfer): from the transfers that were seen, with what they waited.
"""

from __future__ import annotations

import asyncio
import math
from collections.abc import Callable
from dataclasses import dataclass

from seer.errors import ConfigError
from seer.node_books import NodeBooks
from seer.sim.costs import InstanceCost
from seer.sim.shared_link import SharedLink
from seer.sim.workloads import GPUS_PER_NODE
from seer.transfer import MoveCost, TransferCosts, TransferEstimate
from seer.types import Chunk

NEAR_BYTES_S = 100e9
"""Copies between instances of a node through its main memory: half of the nominal bandwidth of eight DDR5 channels."""


@dataclass(frozen=True, slots=True, kw_only=True)
class NetworkShape:
    """The nodes of a cluster."""

    nic_bytes_s: float
    """Of a node, in each direction."""
    gpus_per_node: int = GPUS_PER_NODE
    near_bytes_s: float = NEAR_BYTES_S
    has_near_tier: bool = True

    def __post_init__(self) -> None:
        if min(self.nic_bytes_s, self.near_bytes_s) <= 0:
            raise ConfigError("a network without bandwidth", hint="--nic-gbps above 0")

    def instances_per_node(self, num_gpus: int) -> int:
        """Instances of so many GPUs that share a node; 1 if they need several."""
        return max(1, self.gpus_per_node // num_gpus)

    def card_bytes_s(self, num_gpus: int) -> float:
        """What the card, or cards, of an instance's node carry."""
        return self.nic_bytes_s * max(1.0, num_gpus / self.gpus_per_node)


@dataclass(frozen=True, slots=True, kw_only=True)
class NetworkUse:
    """What the network carried in a run."""

    near_bytes: float
    far_bytes: float
    saved_bytes: float
    busiest_read_share: float
    """Of the run, in which the card that read longest was reading."""
    busiest_save_share: float
    load_s: float
    """From the start to the end of loads from other nodes, summed over them."""
    alone_s: float
    """The same, had each load had the card for itself."""


class ClusterNetwork:
    """The nodes of one simulated fleet."""

    def __init__(self, shape: NetworkShape, cost: InstanceCost, num_instances: int) -> None:
        self._shape = shape
        self._bytes_per_token = cost.model.kv_bytes_per_token
        self._per_node = shape.instances_per_node(cost.num_gpus)
        self._card_bytes_s = shape.card_bytes_s(cost.num_gpus)
        num_nodes = -(-num_instances // self._per_node)
        self._reads = [SharedLink(self._card_bytes_s) for _ in range(num_nodes)]
        self._saves = [SharedLink(self._card_bytes_s) for _ in range(num_nodes)]
        self._memory = [SharedLink(shape.near_bytes_s) for _ in range(num_nodes)]
        self._books = NodeBooks()
        for instance in range(num_instances):
            self._books.place(instance, self.node_name(instance))
        self._stored: dict[int, int] = {}  # request -> its first tokens, whose KV is in the store
        self._load_s = self._alone_s = 0.0
        self.estimate = TransferEstimate(self._costs(cost))
        """What the scheduler believes."""

    def node_name(self, instance: int) -> str:
        """Instances with equal names share a node."""
        return f"node-{instance // self._per_node}"

    def _costs(self, cost: InstanceCost) -> TransferCosts:
        own = cost.transfer_costs()
        near = MoveCost(latency_s=0.0, bandwidth_bytes_s=self._shape.near_bytes_s)
        far = MoveCost(latency_s=0.0, bandwidth_bytes_s=self._card_bytes_s)
        near_move = near if self._shape.has_near_tier else None
        return TransferCosts(move=far, near_move=near_move, prefill=own.prefill, bytes_per_token=own.bytes_per_token)

    def load(self, chunk: Chunk, instance: int, num_held: int, num_tokens: int, done: Callable[[], None]) -> int:
        """Bring KV of tokens `num_held .. num_held + num_tokens` to an instance; `done` is called when it is there.

        Returns how many of them come: the node's own, and those that are in the store.
        """
        node = instance // self._per_node
        near = 0
        if self._shape.has_near_tier:
            near = min(num_tokens, max(0, self._books.near_tokens(chunk.request, instance) - num_held))
        far = max(0, min(num_tokens, self._stored.get(chunk.request, 0) - num_held) - near)
        near_bytes, far_bytes = near * self._bytes_per_token, far * self._bytes_per_token
        waits = _After(int(near_bytes > 0) + int(far_bytes > 0), done)
        if near_bytes:
            self._timed(self._memory[node], near_bytes, waits, self.estimate.saw_near_move)
        if far_bytes:
            self._alone_s += far_bytes / self._card_bytes_s
            self._timed(self._reads[node], far_bytes, waits, self._saw_far_load)
        return near + far

    def computed(self, num_held: int, num_tokens: int) -> None:
        """An instance computes so many tokens after so many."""
        self.estimate.saw_prefill(num_tokens, self.estimate.given.prefill.seconds(num_held, num_tokens))

    def save(self, request: int, instance: int, num_tokens: int, num_new_tokens: int, since_s: float) -> None:
        """A chunk that began then has ended with so many tokens; those that it made go to the store."""
        self._books.left(request, instance, num_tokens)
        first = num_tokens - num_new_tokens
        num_stored = self._stored.setdefault(request, first)
        num_bytes = num_new_tokens * self._bytes_per_token
        card = self._saves[instance // self._per_node]
        gone = card.send(num_bytes, lambda: self._saved(request, num_tokens), since_s=since_s)
        if num_stored == first:
            self._saved(request, num_tokens - math.ceil((num_bytes - gone) / self._bytes_per_token))

    def free(self, request: int, instance: int, num_new_tokens: int, since_s: float) -> None:
        """The request has ended with a chunk of so many tokens, whose KV was saved as it was made."""
        self._books.forget(request)
        self._stored.pop(request, None)
        num_bytes = num_new_tokens * self._bytes_per_token
        self._saves[instance // self._per_node].send(num_bytes, _nothing, since_s=since_s)

    def use(self, makespan_s: float) -> NetworkUse:
        """What was carried."""
        return NetworkUse(
            near_bytes=sum(link.num_bytes for link in self._memory),
            far_bytes=sum(link.num_bytes for link in self._reads),
            saved_bytes=sum(link.num_bytes for link in self._saves),
            busiest_read_share=max(link.busy_s for link in self._reads) / makespan_s,
            busiest_save_share=max(link.busy_s for link in self._saves) / makespan_s,
            load_s=self._load_s,
            alone_s=self._alone_s,
        )

    def _timed(
        self, link: SharedLink, num_bytes: float, done: Callable[[], None], saw: Callable[[int, float], None]
    ) -> None:
        clock = asyncio.get_running_loop().time
        began_s = clock()

        def arrived() -> None:
            saw(int(num_bytes), clock() - began_s)
            done()

        link.send(num_bytes, arrived)

    def _saw_far_load(self, num_bytes: int, seconds: float) -> None:
        self._load_s += seconds
        self.estimate.saw_move(num_bytes, seconds)

    def _saved(self, request: int, num_tokens: int) -> None:
        if request in self._stored:  # it has not ended
            self._stored[request] = max(self._stored[request], num_tokens)


def _nothing() -> None:
    """Nothing waits for the KV of a response that has ended."""


class _After:
    """Calls back at the last of several ends; at once for none."""

    def __init__(self, num: int, done: Callable[[], None]) -> None:
        self._num, self._done = num, done
        if not num:
            asyncio.get_running_loop().call_soon(done)

    def __call__(self) -> None:
        self._num -= 1
        if not self._num:
            self._done()
