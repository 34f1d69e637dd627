# SPDX-License-Identifier: Apache-2.0
"""When does the pool's traffic limit a cluster? The paper's workloads on nodes that share a network card each.

    python benchmarks/simulator/network.py [--workloads moonlight,...] [--nodes 64] [--gbps 3200,400,...] [--json FILE]
    python benchmarks/simulator/network.py --tables FILE

Every workload is grown to fill the nodes of eight GPUs. `unlimited` is the simulator without contention: each transfer
has 400 Gbit/s per GPU of its instance. `no near tier` has every move go over the cards, also inside a node. Without
speculation: drafts make tokens, and with them KV, faster by what they gain. With --json, results are added to the file
as they come, and what is in it already is not run again.
"""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from seer.sim.cluster import simulate
from seer.sim.network import NetworkShape
from seer.sim.workloads import PAPER, paper_workload
from stamp import take_stamp

UNLIMITED = 0.0
"""Stands for the simulator without contention."""


def measure(name: str, nodes: int, gbps: float, *, near: bool, seed: int) -> dict[str, Any]:
    workload = paper_workload(name, seed=seed, num_nodes=nodes)
    shape = NetworkShape(nic_bytes_s=gbps * 1e9 / 8, has_near_tier=near) if gbps else None
    result = simulate(workload, "seer", speculation="off", network=shape)
    found, use = result.summary, result.network
    return {
        "workload": name,
        "nodes": nodes,
        "instances": workload.num_instances,
        "requests": found.num_requests,
        "gbps": gbps,
        "near": near,
        "makespan_s": found.makespan_s,
        "migrations": found.migrations,
        "node_changes": found.node_changes,
        "recomputed_tokens": found.recomputed_tokens,
        "num_tokens": found.num_tokens,
        "wall_s": result.wall_s,
    } | ({name: getattr(use, name) for name in use.__slots__} if use is not None else {})


def key(row: dict[str, Any]) -> tuple[str, int, float, bool]:
    return row["workload"], row["nodes"], row["gbps"], row["near"]


def tables(rows: list[dict[str, Any]]) -> str:
    lines = []
    for name in dict.fromkeys(row["workload"] for row in rows):
        mine = [row for row in rows if row["workload"] == name]
        (free,) = [row for row in mine if not row["gbps"]]
        lines += [
            "",
            f"`{name}`: {free['instances']} instances, {free['requests']:,} responses, "
            f"{free['makespan_s']:,.0f} s with the full bandwidth for each transfer",
            "",
            "| card, Gbit/s | time | moves inside a node | KV from other nodes | saved | busiest card | loads take "
            "| computed again |",
            "|---|---|---|---|---|---|---|---|",
        ]
        for row in sorted((one for one in mine if one["gbps"]), key=lambda one: (-one["gbps"], not one["near"])):
            inside = 1.0 - row["node_changes"] / max(1, row["migrations"])
            card = f"{row['gbps']:g}" + ("" if row["near"] else ", no near tier")
            lines.append(
                f"| {card} | {row['makespan_s'] / free['makespan_s']:.2f} | {inside:.0%} of {row['migrations']:,} "
                f"| {row['far_bytes'] / 1e12:.2f} TB | {row['saved_bytes'] / 1e12:.1f} TB "
                f"| {max(row['busiest_read_share'], row['busiest_save_share']):.1%} "
                f"| {row['load_s'] / row['alone_s'] if row['alone_s'] else 1.0:.2f} x alone "
                f"| {row['recomputed_tokens'] / row['num_tokens']:.2%} |"
            )
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--workloads", default=",".join(PAPER))
    parser.add_argument("--nodes", type=int, default=64)
    parser.add_argument("--gbps", default="100,10,1", help="of a node's card (%(default)s)")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--json", type=Path)
    parser.add_argument("--tables", type=Path, metavar="FILE", help="print the tables of an earlier run")
    args = parser.parse_args()
    if args.tables is not None:
        print(tables(json.loads(args.tables.read_text())["rows"]))
        return
    stored = args.json is not None and args.json.exists()
    found = json.loads(args.json.read_text()) if stored else {"stamp": take_stamp(args), "rows": []}
    cards = [(UNLIMITED, True), *((float(gbps), True) for gbps in args.gbps.split(","))]
    cards.append((float(args.gbps.split(",")[-1]), False))
    for name in args.workloads.split(","):
        for gbps, near in cards:
            if (name, args.nodes, gbps, near) in {key(row) for row in found["rows"]}:
                continue
            found["rows"].append(measure(name, args.nodes, gbps, near=near, seed=args.seed))
            print({k: round(v, 4) if isinstance(v, float) else v for k, v in found["rows"][-1].items()}, flush=True)
            if args.json is not None:
                args.json.write_text(json.dumps(found, indent=1) + "\n")
    print(tables(found["rows"]))


if __name__ == "__main__":
    main()
