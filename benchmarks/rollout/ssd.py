# SPDX-License-Identifier: Apache-2.0
"""A rollout whose paused KV is several times the pool's DRAM: with an SSD tier, without one, and with enough DRAM.

    python benchmarks/rollout/ssd.py --ssd DIR [--repeat 5] [--out DIR]

Needs `seer model get smollm2` first. Two CPU instances, each with KV memory for a few requests, so that most requests
are paused most of the time. Response lengths are forced, so all variants generate the same tokens; they are compared.

    ssd     DRAM as given, over an SSD tier
    dram    the same DRAM, no SSD tier: KV that finds no room is computed again
    plenty  DRAM for everything

DIR must be on a local disk. With --cold the slab file is dropped from the page cache all the time, so that reads come
from the disk; otherwise a machine with free memory serves most of them from its page cache.
Every run starts its own instances. DIR/ssd.json is written after every run, DIR/ssd.md (a table) at the end.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import os
import resource
import statistics
import sys
import threading
from collections.abc import Iterator, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from measure import Ledger

from seer import Rollout, Sampling
from seer.metrics.events import Event, PoolUsed, Prefilling, Queued, Started, Stepped, Stopped
from seer.runs.prompts import read_prompts
from stamp import as_text, print_stamp

ROOT = Path(__file__).resolve().parents[2]
PROMPTS = ROOT / "examples" / "prompts" / "mixed.jsonl"
DROP_EVERY_S = 0.2
"""Between two times that the slab is dropped from the page cache: a chunk takes many times as long."""


async def run_once(args: argparse.Namespace, variant: str) -> dict[str, Any]:
    """One rollout on instances of its own."""
    dram_bytes = args.dram_mib << 20
    rollout = Rollout(
        args.model,
        instances=2,
        max_num_seqs=args.max_num_seqs,
        kv_blocks=args.kv_blocks,
        block_size=args.block_size,
        scheduler=args.scheduler,
        speculation="off",
        pool_bytes=args.plenty_mib << 20 if variant == "plenty" else dram_bytes,
        pool_ssd_dir=args.ssd if variant == "ssd" else None,
        pool_ssd_bytes=args.ssd_mib << 20 if variant == "ssd" else None,
    )
    good, _ = read_prompts(PROMPTS)
    prompts = rollout.encode(good[: args.groups], n=args.n, sampling=Sampling(max_tokens=args.max_tokens))
    lengths = [[args.max_tokens - (7 * g + 13 * i) % (args.max_tokens // 4) for i in range(args.n)]
               for g in range(len(prompts))]  # fmt: skip
    events: list[Event] = []
    tokens: dict[tuple[int, int], list[int]] = {}
    cpu_s = -_children_cpu_s()
    with _dropped(args.ssd if args.cold and variant == "ssd" else None):
        async with rollout:
            async for group in rollout.run(prompts, lengths=lengths, events=events.append):
                tokens |= {(r.group, r.index): list(r.token_ids) for r in group.responses}
            assert rollout.engine.block_bytes is not None
            bytes_per_token = rollout.engine.block_bytes // rollout.config.kv.block_size
    summary = rollout.summary
    assert summary is not None
    return {
        "variant": variant,
        "cpu_s": cpu_s + _children_cpu_s(),
        "summary": asdict(summary),
        "paused_to_dram": most_paused_tokens(events) * bytes_per_token / dram_bytes,
        "computed_tokens": sum(e.num_tokens for e in events if isinstance(e, Prefilling)) + summary.num_tokens,
        "load_s": sum(e.load_s for e in events if isinstance(e, Stepped)),
        "pool": [{name: getattr(e, name) for name in e.__struct_fields__} for e in events if isinstance(e, PoolUsed)],
        "tokens": hash(tuple(sorted((key, tuple(ids)) for key, ids in tokens.items()))),
    }


def _children_cpu_s() -> float:
    """CPU seconds of the instances that have ended: unlike wall time, other work on the machine hardly changes it."""
    used = resource.getrusage(resource.RUSAGE_CHILDREN)
    return used.ru_utime + used.ru_stime


def most_paused_tokens(events: Sequence[Event]) -> int:
    """The most tokens that requests between two chunks had at any time, prompts included."""
    prompt: dict[int, int] = {}
    paused: dict[int, int] = {}
    most = 0
    for event in events:
        if isinstance(event, Queued):
            prompt[event.request] = event.num_prompt_tokens
        elif isinstance(event, Started):
            paused.pop(event.request, None)
        elif isinstance(event, Stopped) and event.reason in ("limit", "parked"):
            paused[event.request] = prompt[event.request] + event.num_generated
            most = max(most, sum(paused.values()))
    return most


@contextlib.contextmanager
def _dropped(folder: Path | None) -> Iterator[None]:
    """Keep the slab below a folder out of the page cache."""
    ended = threading.Event()

    def work() -> None:
        while folder is not None and not ended.wait(DROP_EVERY_S):
            for slab in folder.rglob("*.slab"):
                with contextlib.suppress(OSError):
                    descriptor = os.open(slab, os.O_RDONLY)
                    os.fdatasync(descriptor)  # only clean pages can be dropped
                    os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_DONTNEED)
                    os.close(descriptor)

    thread = threading.Thread(target=work)
    thread.start()
    try:
        yield
    finally:
        ended.set()
        thread.join()


def table(runs: Sequence[dict[str, Any]]) -> str:
    """One row per variant: medians and ranges."""
    lines = [
        "| variant | s | range | CPU s | range | computed again | KV loading s | SSD read | written | refused blocks |",
        "|---|---|---|---|---|---|---|---|---|---|",
    ]
    for variant in dict.fromkeys(run["variant"] for run in runs):
        found = [run for run in runs if run["variant"] == variant]

        def median(name: str, found: list[dict[str, Any]] = found) -> float:
            return statistics.median(run["summary"][name] for run in found)

        spans = [run["summary"]["makespan_s"] for run in found]
        cpu, load_s = [run["cpu_s"] for run in found], statistics.median(run["load_s"] for run in found)
        again = statistics.median(run["summary"]["recomputed_tokens"] / run["computed_tokens"] for run in found)
        lines.append(
            f"| {variant} | {statistics.median(spans):.1f} | {min(spans):.1f} to {max(spans):.1f} "
            f"| {statistics.median(cpu):.1f} | {min(cpu):.1f} to {max(cpu):.1f} | {again:.1%} "
            f"| {load_s:.2f} | {median('pool_ssd_read_bytes') / 2**20:.0f} MiB "
            f"| {median('pool_ssd_written_bytes') / 2**20:.0f} MiB | {median('pool_refused_blocks'):.0f} |"
        )
    ratio = statistics.median(run["paused_to_dram"] for run in runs)
    same = len({run["tokens"] for run in runs}) == 1
    return "\n".join([*lines, "", f"Most paused KV: {ratio:.1f} times the DRAM of `ssd` and `dram`; tokens "
                      f"{'identical in all runs' if same else 'DIFFER'}."]) + "\n"  # fmt: skip


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="smollm2")
    parser.add_argument("--ssd", type=Path, required=True, help="folder on a local disk")
    parser.add_argument("--cold", action="store_true", help="keep the SSD file out of the page cache")
    parser.add_argument("--variants", default="ssd,dram,plenty")
    parser.add_argument("--scheduler", default="seer")
    parser.add_argument("--groups", type=int, default=4)
    parser.add_argument("--n", type=int, default=4)
    parser.add_argument("--max-tokens", type=int, default=192)
    parser.add_argument("--max-num-seqs", type=int, default=8)
    parser.add_argument("--kv-blocks", type=int, default=192, help="of each instance")
    parser.add_argument(
        "--block-size", type=int, default=2, help="tokens; what a block lacks at a park is computed again"
    )
    parser.add_argument("--dram-mib", type=int, default=16)
    parser.add_argument("--ssd-mib", type=int, default=2048)
    parser.add_argument("--plenty-mib", type=int, default=2048)
    parser.add_argument("--repeat", type=int, default=3)
    parser.add_argument("--limit-s", type=float, default=3600.0)
    parser.add_argument("--out", type=Path, default=ROOT / "runs" / "bench-rollout")
    args = parser.parse_args()
    ledger = Ledger(args.out / "ssd.json", args.limit_s, print_stamp(args))
    variants = args.variants.split(",")
    for repetition in range(args.repeat):
        # Turned around each time, so that a machine that gets slower or faster favours none.
        for variant in variants if repetition % 2 == 0 else variants[::-1]:
            found = asyncio.run(run_once(args, variant))
            ledger.add({"repetition": repetition} | found)
            summary = found["summary"]
            again = f"{summary['recomputed_tokens']} of {found['computed_tokens']} tokens computed again"
            print(
                f"{variant:<7} {summary['makespan_s']:6.1f} s, {found['cpu_s']:.1f} CPU s, {again}, "
                f"paused {found['paused_to_dram']:.1f}x DRAM",
                flush=True,
            )
    text = as_text(ledger.content["stamp"]) + "\n\n" + table(ledger.content["runs"])
    (args.out / "ssd.md").write_text(text)
    print(text)


if __name__ == "__main__":
    main()
