# SPDX-License-Identifier: Apache-2.0
"""Looks at every node of a Ray cluster: what is installed and free there, its clock, its way to this machine and to
another node.

Waits for                                    unblocked by
  a node's answers                             it, NODE_DEADLINE_S
"""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import Mapping
from typing import Any

import msgspec
from msgspec.structs import replace

from seer.hosting.ray.cluster import RayCluster
from seer.hosting.ray.host_actor import sentence_of
from seer.hosting.ray.node_facts import NodeFacts, NodeProbe, Reached, packages
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
    """How it reads from the driver's machine."""
    reached_next: Reached | None = None
    """How it reads from the node after it in the list, the last one from the first; None where there is no other."""
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
        probes = [_probe_on(cluster, id) for id, _ in nodes]
        try:
            # One after the other: together they would share the bandwidth of this machine.
            reports = [await _look_at(cluster, *node, probe, port) for node, probe in zip(nodes, probes, strict=True)]
            return [await _with_next(reports, probes, i) for i in range(len(reports))]
        finally:
            for probe in probes:
                with contextlib.suppress(Exception):
                    cluster.ray.kill(probe)
    finally:
        server.close()
        await cluster.close()


def _probe_on(cluster: RayCluster, id: str) -> Any:
    from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

    options = {"num_cpus": 0, "scheduling_strategy": NodeAffinitySchedulingStrategy(id, soft=False)}
    return cluster.ray.remote(**options)(NodeProbe).remote()


async def _look_at(cluster: RayCluster, id: str, node: dict[str, Any], probe: Any, port: int) -> NodeReport:
    resources = {name: float(amount) for name, amount in node["Resources"].items() if name in ("CPU", "GPU")}
    report = NodeReport(id=id, address=str(node["NodeManagerAddress"]), resources=resources)
    try:
        async with asyncio.timeout(NODE_DEADLINE_S):
            facts = await probe.facts.remote()
            clock = await _compare_clocks(probe)
            reached = await probe.reach.remote(cluster.host, port, PROBE_BYTES)
    except TimeoutError:
        return replace(report, troubles=[f"no answer within {NODE_DEADLINE_S:g} s"])
    except Exception as error:  # Ray has a class for every way in which a node can fail
        return replace(report, troubles=[sentence_of(error)])
    troubles = troubles_of(facts, reached, cluster.host, resources)
    return replace(report, facts=facts, clock=clock, reached=reached, troubles=troubles)


async def _with_next(reports: list[NodeReport], probes: list[Any], number: int) -> NodeReport:
    """The report of one node, with how it reads from the one after it."""
    report, other = reports[number], (number + 1) % len(reports)
    if other == number or report.facts is None or reports[other].facts is None:
        return report
    host = reports[other].address
    try:
        async with asyncio.timeout(NODE_DEADLINE_S):
            port = await probes[other].offer.remote(host, PROBE_BYTES)
            reached = await probes[number].reach.remote(host, port, PROBE_BYTES)
    except Exception as error:  # Ray's, or the deadline
        reached = Reached(error=sentence_of(error))
    return replace(report, reached_next=reached, troubles=[*report.troubles, *_cannot_reach(reached, host)])


def troubles_of(facts: NodeFacts, reached: Reached, host: str, resources: Mapping[str, float]) -> list[str]:
    """Why instances could not run on a node that answered, or not as they run here."""
    troubles = []
    if facts.seer != our_version():
        troubles.append(f"Seer {facts.seer} there, {our_version()} here: install one version")
    here = packages()
    for name, version in facts.packages.items():
        if here.get(name, version) != version:
            troubles.append(f"{name} {version} there, {here[name]} here: install one version")
    num_gpus = int(resources.get("GPU", 0))
    if facts.num_gpus is not None and num_gpus > facts.num_gpus:
        troubles.append(f"Ray counts {num_gpus} GPUs there, NVIDIA's driver {facts.num_gpus}")
    return troubles + _cannot_reach(reached, host)


def _cannot_reach(reached: Reached, host: str) -> list[str]:
    return [] if reached.error is None else [f"it cannot connect to {host}: {reached.error}"]


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
