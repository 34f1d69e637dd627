# SPDX-License-Identifier: Apache-2.0
"""Which CPU cores each instance gets: cores of one NUMA node, so that its memory is near them.

Linux places memory on the node of the core that first writes it, so a process that is kept on cores of one node has its
memory there too.
"""

from __future__ import annotations

import itertools
from collections.abc import Collection, Sequence
from pathlib import Path

NODES = Path("/sys/devices/system/node")


def numa_nodes(folder: Path = NODES) -> list[list[int]]:
    """The cores of each NUMA node, as the kernel lists them; empty where it does not."""
    lists = sorted(folder.glob("node[0-9]*/cpulist"), key=lambda path: int(path.parent.name.removeprefix("node")))
    return [cores for path in lists if (cores := _parse_list(path.read_text()))]


def _parse_list(text: str) -> list[int]:
    cores: list[int] = []
    for word in text.strip().split(","):
        first, _, last = word.partition("-")
        if first:
            cores += range(int(first), int(last or first) + 1)
    return cores


def assign_cores(
    allowed: Collection[int], nodes: Sequence[Sequence[int]], num_instances: int, cores_each: int = 1
) -> list[tuple[int, ...]]:
    """The cores of each instance: consecutive ones of a node, nodes in turn; used again where there are too few.

    Where no node has `cores_each` cores, an instance gets them across nodes, or as many as there are.
    """
    known = {core for node in nodes for core in node}
    usable = [sorted(set(node) & set(allowed)) for node in [*nodes, sorted(set(allowed) - known)]]
    per_node = [_groups(cores, cores_each) for cores in usable]
    groups = [group for row in itertools.zip_longest(*per_node) for group in row if group]
    if not groups:
        flat = [core for cores in usable for core in cores]
        groups = _groups(flat, cores_each) or [tuple(flat)]
    return [groups[instance % len(groups)] for instance in range(num_instances)]


def _groups(cores: Sequence[int], size: int) -> list[tuple[int, ...]]:
    return [tuple(cores[at : at + size]) for at in range(0, len(cores) - size + 1, size)]
