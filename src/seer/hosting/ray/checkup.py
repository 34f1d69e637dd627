# SPDX-License-Identifier: Apache-2.0
"""Looks at every node of a Ray cluster: what is installed and free there, its clock, and its way to this machine.

Waits for                                    unblocked by
  a node's answers                             it, NODE_DEADLINE_S
"""

from __future__ import annotations

import asyncio
import contextlib
import time
from typing import Any

import msgspec

from seer.hosting.ray.cluster import RayCluster
from seer.hosting.ray.host_actor import sentence_of
from seer.hosting.ray.node_facts import NodeFacts, NodeProbe, Reached
from seer.hosting.remote.clock import ClockOffset, offset_of
from seer.hosting.remote.handshake import our_version

NODE_DEADLINE_S = 60.0
"""Ray starts a process for the probe, which imports numpy."""
PROBE_BYTES = 64 << 20
_NUM_CLOCK_PROBES = 5


class NodeReport(msgspec.Struct, frozen=True, kw_only=True):
    """One node, as far as it answered."""

    id: str
    address: str
    resources: dict[str, float]
    facts: NodeFacts | None = None
    clock: ClockOffset | None = None
    reached: Reached | None = None
    troubles: list[str] = []
    """Why instances cannot run there."""


async def look_at_nodes(address: str) -> list[NodeReport]:
    """A report of every node, in the order of their addresses."""
    cluster = RayCluster(address)
    await cluster.connect()
    server = await asyncio.start_server(_send_probe, cluster.host, 0)
    try:
        port = server.sockets[0].getsockname()[1]
        nodes = sorted(cluster.nodes().items(), key=lambda item: (str(item[1]["NodeManagerAddress"]), item[0]))
        # One after the other: together they would share the bandwidth of this machine.
        return [await _look_at(cluster, id, node, port) for id, node in nodes]
    finally:
        server.close()
        await cluster.close()


async def _look_at(cluster: RayCluster, id: str, node: dict[str, Any], port: int) -> NodeReport:
    from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

    resources = {name: float(amount) for name, amount in node["Resources"].items() if name in ("CPU", "GPU")}
    report = NodeReport(id=id, address=str(node["NodeManagerAddress"]), resources=resources)
    options = {"num_cpus": 0, "scheduling_strategy": NodeAffinitySchedulingStrategy(id, soft=False)}
    probe = cluster.ray.remote(**options)(NodeProbe).remote()
    try:
        async with asyncio.timeout(NODE_DEADLINE_S):
            facts = await probe.facts.remote()
            clock = await _compare_clocks(probe)
            reached = await probe.reach.remote(cluster.host, port, PROBE_BYTES)
    except TimeoutError:
        return msgspec.structs.replace(report, troubles=[f"no answer within {NODE_DEADLINE_S:g} s"])
    except Exception as error:  # Ray has a class for every way in which a node can fail
        return msgspec.structs.replace(report, troubles=[sentence_of(error)])
    finally:
        with contextlib.suppress(Exception):
            cluster.ray.kill(probe)
    troubles = troubles_of(facts, reached, cluster.host)
    return msgspec.structs.replace(report, facts=facts, clock=clock, reached=reached, troubles=troubles)


def troubles_of(facts: NodeFacts, reached: Reached, host: str) -> list[str]:
    """Why instances could not run on a node that answered."""
    troubles = []
    if facts.seer != our_version():
        troubles.append(f"Seer {facts.seer} there, {our_version()} here: install one version")
    if reached.error is not None:
        troubles.append(f"it cannot connect to {host}: {reached.error}")
    return troubles


async def _compare_clocks(probe: Any) -> ClockOffset:
    probes = []
    for _ in range(_NUM_CLOCK_PROBES):
        asked_s = time.monotonic()
        theirs_s = float(await probe.now_s.remote())
        probes.append((asked_s, theirs_s, time.monotonic()))
    return offset_of(probes)


async def _send_probe(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    """Send PROBE_BYTES to a peer and hang up; the bytes are zeros."""
    with contextlib.suppress(OSError):
        part = bytes(1 << 20)
        for _ in range(PROBE_BYTES // len(part)):
            writer.write(part)
            await writer.drain()
        writer.close()
        await writer.wait_closed()
