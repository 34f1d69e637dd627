# SPDX-License-Identifier: Apache-2.0
"""Places for instances: a placement group of one bundle each, away from nodes that did not answer lately.

Ray finds out about a lost node after a minute; we do after seconds. Until Ray knows, it would place an instance there
again, so nodes that are out of reach are left out by name for SUSPECT_S.

Waits for                                    unblocked by
  a place                                      resources that become free, a node that joins, the deadline
  Ray's answers                                Ray, in threads: they take milliseconds, and longer on a busy cluster
"""

from __future__ import annotations

import asyncio
import contextlib
from dataclasses import dataclass
from typing import Any

from seer.errors import InstanceError
from seer.hosting.ray.cluster import RayCluster

SUSPECT_S = 120.0
"""Ray has noticed by then, or the node answers again."""
_LOOK_S = 1.0
"""How long one wait in a thread takes: a start that is cancelled leaves the thread behind for as long."""


@dataclass(frozen=True, slots=True)
class Place:
    """Where an instance may run."""

    group: Any
    node: str
    """Ray's id of the node."""


class Placer:
    """Finds places, and knows which nodes to leave out."""

    def __init__(self, cluster: RayCluster) -> None:
        self._cluster = cluster
        self._suspected_s: dict[str, float] = {}

    def suspect(self, node: str) -> None:
        """A node is out of reach: place nothing there for a while."""
        self._suspected_s[node] = _now_s()

    def suspects(self) -> list[str]:
        """Nodes to leave out now."""
        oldest_s = _now_s() - SUSPECT_S
        return sorted(node for node, at_s in self._suspected_s.items() if at_s > oldest_s)

    async def place(self, name: str, bundle: dict[str, float], deadline_s: float) -> Place:
        """Wait for a place for this bundle; what was reserved is given back when that fails."""
        last_s = _now_s() + deadline_s
        while True:
            avoid = self.suspects()
            group = await self._reserved(name, bundle, avoid)
            try:
                while _now_s() < last_s and avoid == self.suspects():
                    if await asyncio.to_thread(group.wait, _LOOK_S):
                        return Place(group, await asyncio.to_thread(self._node_of, group))
            except BaseException:
                await asyncio.to_thread(self.give_back, group)
                raise
            await asyncio.to_thread(self.give_back, group)
            if _now_s() >= last_s:
                wanted = ", ".join(f"{amount:g} {resource}" for resource, amount in bundle.items())
                raise InstanceError(
                    f"no node had a place for {name} within {deadline_s:g} s: it needs {wanted}, "
                    f"the cluster has {await asyncio.to_thread(self._cluster.resources_text)}",
                    hint="fewer instances, or more nodes; `ray status` shows what is in use",
                )

    def give_back(self, group: Any) -> None:
        """Free a place."""
        from ray.util.placement_group import remove_placement_group

        if self._cluster.is_joined:
            with contextlib.suppress(Exception):  # a cluster that is out of reach has lost it anyway
                remove_placement_group(group)

    async def _reserved(self, name: str, bundle: dict[str, float], avoid: list[str]) -> Any:
        """A placement group, which need not have its place yet. Cancelled, it is given back once Ray has made it."""
        reserving = asyncio.ensure_future(asyncio.to_thread(self._reserve, name, bundle, avoid))
        try:
            return await asyncio.shield(reserving)
        except asyncio.CancelledError:
            with contextlib.suppress(Exception):  # none was made, and the cancellation goes on
                await asyncio.to_thread(self.give_back, await reserving)
            raise

    def _reserve(self, name: str, bundle: dict[str, float], avoid: list[str]) -> Any:
        from ray.util.placement_group import placement_group

        # One bundle, so all of an instance's GPUs are on one node; STRICT_PACK says it.
        selector = [{"ray.io/node-id": f"!in({','.join(avoid)})"}] if avoid else None
        return placement_group([bundle], strategy="STRICT_PACK", name=name, bundle_label_selector=selector)

    def _node_of(self, group: Any) -> str:
        from ray.util.placement_group import placement_group_table

        return str(placement_group_table(group)["bundles_to_node_id"][0])


def _now_s() -> float:
    return asyncio.get_running_loop().time()
