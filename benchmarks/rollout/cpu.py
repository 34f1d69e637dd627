# SPDX-License-Identifier: Apache-2.0
"""Rollouts of a real model on a CPU: SmolLM2 on two instances, verl's dispatch against Seer, same prompts and seeds.

    python benchmarks/rollout/cpu.py [--repeat 3] [--limit-s 3600] [--out DIR]

Needs `seer model get smollm2` first. Runs three parts under every scheduler, interleaved and repeated:

    natural   the mixed prompts (from one word to long lists, 24 groups of 8), responses end where the model ends them
    forced    the same prompts, with response lengths forced to those of the first run
    uniform   prompts whose answers have similar lengths

Then one more run of `seer` on the mixed prompts, with a share of its responses verified. Two instances take two cores;
run nothing else on the machine. DIR/cpu.json is written after every run, DIR/cpu.md (tables for results.md) at the end.
"""

from __future__ import annotations

import argparse
import asyncio
import sys
from dataclasses import asdict
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from measure import Ledger, measure, table

from seer import Rollout, Sampling
from seer.runs.prompts import read_prompts
from stamp import as_text, print_stamp

ROOT = Path(__file__).resolve().parents[2]
PROMPTS = ROOT / "examples" / "prompts"
BLOCK_SIZE = 16


async def run(args: argparse.Namespace, ledger: Ledger) -> None:
    schedulers = args.schedulers.split(",")
    kv_blocks = args.kv_tokens // BLOCK_SIZE if args.kv_tokens else None
    async with Rollout(
        args.model,
        instances=args.instances,
        max_num_seqs=args.max_num_seqs,
        kv_blocks=kv_blocks,
        block_size=BLOCK_SIZE,
    ) as rollout:
        sampling = Sampling(max_tokens=args.max_tokens)
        lengths: Any = None
        for part in args.parts.split(","):
            name = "uniform" if part == "uniform" else "mixed"
            good, _ = read_prompts(PROMPTS / f"{name}.jsonl")
            prompts = rollout.encode(good[: args.groups], n=args.n, sampling=sampling)
            forced = lengths if part == "forced" else None
            if part == "forced" and forced is None:
                ledger.skip("forced lengths: the part natural was not run")
                continue
            print(f"{part}: {len(prompts)} groups of {args.n}", flush=True)
            found = await measure(
                rollout, prompts, schedulers, ledger, label={"part": part}, lengths=forced,
                repeat=args.repeat if part == "natural" else args.repeat_others,
            )  # fmt: skip
            lengths = found if part == "natural" else lengths
        if args.verify:
            good, _ = read_prompts(PROMPTS / "mixed.jsonl")
            prompts = rollout.encode(good[: args.groups], n=args.n, sampling=sampling)
            async for _ in rollout.run(prompts, scheduler="seer", verify=args.verify):
                pass
            if rollout.verification is not None:
                is_clean = {"is_clean": rollout.verification.is_clean}
                ledger.content["verification"] = asdict(rollout.verification) | is_clean
                ledger.save()


def write_tables(ledger: Ledger, schedulers: list[str], path: Path) -> None:
    lines = [as_text(ledger.content["stamp"]) + "\n"]
    for part in dict.fromkeys(run["part"] for run in ledger.content["runs"]):
        lines += [f"### {part}\n", table([r for r in ledger.content["runs"] if r["part"] == part], schedulers)]
    verification = ledger.content.get("verification")
    if verification is not None:
        verdict = "clean" if verification["is_clean"] else "NOT CLEAN"
        lines.append(
            f"Verification of a `seer` run: {verdict}, {verification['num_responses']} responses scored again.\n"
        )
    path.write_text("\n".join(lines))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="smollm2")
    parser.add_argument("--instances", type=int, default=2)
    parser.add_argument("--max-num-seqs", type=int, default=16)
    parser.add_argument("--kv-tokens", type=int, help="KV memory of each instance; 1 GiB unless given")
    parser.add_argument("--n", type=int, default=8)
    parser.add_argument("--groups", type=int, default=24)
    parser.add_argument("--max-tokens", type=int, default=1024)
    parser.add_argument("--schedulers", default="verl-sync,verl,seer")
    parser.add_argument("--parts", default="natural,forced,uniform")
    parser.add_argument("--repeat", type=int, default=3)
    parser.add_argument("--repeat-others", type=int, default=1, help="of the parts that are not natural (%(default)s)")
    parser.add_argument("--verify", type=float, default=0.05, help="share of a last run's responses; 0 for none")
    parser.add_argument("--limit-s", type=float, default=3600.0)
    parser.add_argument("--out", type=Path, default=ROOT / "runs" / "bench-rollout")
    args = parser.parse_args()
    ledger = Ledger(args.out / "cpu.json", args.limit_s, print_stamp(args))
    asyncio.run(run(args, ledger))
    write_tables(ledger, args.schedulers.split(","), args.out / "cpu.md")
    print((args.out / "cpu.md").read_text())


if __name__ == "__main__":
    main()
