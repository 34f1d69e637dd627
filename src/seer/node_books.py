# SPDX-License-Identifier: Apache-2.0
"""Which node each instance is on, and the KV of which requests a node holds.

A request leaves its KV in the memory of the node that it ran on, and a request that moves brings it along. So a node
holds what the request had when it last left that node. This is a hint for prices and places: a node may have dropped
the KV since, and then it comes from another node or is computed.

Invariants
  1. While all instances are on one node nothing is kept per request.
  2. Nothing is kept of a request that has ended.
"""

from __future__ import annotations

import bisect
from collections.abc import Sequence

Node = str | None
"""A name for each node; None for the driver's own machine."""


class NodeBooks:
    """The nodes of a fleet."""

    def __init__(self) -> None:
        self.of: list[Node] = []
        """By instance."""
        self.are_many = False
        self._members: dict[Node, list[int]] = {}
        self._held: dict[int, dict[Node, int]] = {}  # request -> node -> tokens

    def place(self, instance: int, node: Node) -> None:
        """The instance is on this node from now on; a new one has the next id."""
        if instance == len(self.of):
            self.of.append(node)
        else:
            self._take_out(instance)
            self.of[instance] = node
        bisect.insort(self._members.setdefault(node, []), instance)  # a large fleet enters one by one
        self.are_many = len(self._members) > 1

    def _take_out(self, instance: int) -> None:
        members = self._members[self.of[instance]]
        members.remove(instance)
        if not members:
            del self._members[self.of[instance]]

    def members(self, instance: int) -> Sequence[int]:
        """The instances on its node, itself included, in order."""
        return self._members[self.of[instance]]

    def left(self, request: int, instance: int, num_tokens: int) -> None:
        """The request leaves the instance with KV of so many tokens."""
        if self.are_many:
            self._held.setdefault(request, {})[self.of[instance]] = num_tokens

    def near_tokens(self, request: int, instance: int) -> int:
        """Leading tokens of the request whose KV the instance's node holds."""
        held = self._held.get(request)
        return held.get(self.of[instance], 0) if held is not None else 0

    def forget(self, request: int) -> None:
        """The request has ended."""
        self._held.pop(request, None)
