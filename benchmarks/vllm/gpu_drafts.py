# SPDX-License-Identifier: Apache-2.0
"""Grouped drafts on the GPU against plain vLLM, through Seer's own instance: batches of fixed size and whole rollouts.

    python benchmarks/vllm/gpu_drafts.py --model DIR --out DIR --mode plain|gpu|local|local-drafts [--limit-s 500]
    python benchmarks/vllm/gpu_drafts.py --compare DIR/plain.json DIR/gpu.json

One engine per call and mode; the modes `local` and `local-drafts` are the embedded engine. `--engine` has further
arguments of vLLM, and `--label` names the result where one mode runs with several of them. Prompts are those of a
recording, an .npz with `prompts` (concatenated token ids) and `prompt_lengths`; nothing was tuned on those of the
batches (--first). A batch is groups of 16 that run together. At 1 and 8 requests the siblings have run before, in the
same run. DIR/LABEL.json has every repetition, the engine's counters, and the tokens of seeded requests, which --compare
holds against another mode's.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import statistics
import sys
import time
from collections import Counter
from pathlib import Path
from typing import Any

import numpy as np

ROOT = Path(__file__).resolve().parents[2]
sys.path[:0] = [str(ROOT / "src"), str(ROOT / "benchmarks")]

from seer.config import VllmSpeculation
from seer.types import Chunk, ChunkOutput, Sampling
from stamp import QWEN_MIX, print_stamp
from turns import await_turn, end_turn

GROUP = 16
BATCHES = (1, 8, 16, 64, 128, 256)


def vllm_instance(args: argparse.Namespace) -> Any:
    from seer.engine.vllm.instance import VllmInstance
    from seer.engine.vllm.settings import VllmSettings

    speculation = None
    if args.mode == "gpu":
        speculation = VllmSpeculation(place="gpu", max_draft_tokens=args.draft_tokens, fixed_tokens=args.fixed_tokens)
    settings = VllmSettings(
        model_dir=str(args.model),
        max_num_seqs=args.max_num_seqs,
        max_model_len=6144,
        device=args.device,
        kv_memory_bytes=args.kv_gib << 30,
        speculation=speculation,
        engine=json.loads(args.engine),
    )
    return VllmInstance(0, settings, max_waiting=4096)


def local_instance(args: argparse.Namespace) -> Any:
    """The embedded engine, as a rollout hosts it."""
    from seer.drafting.grouped_drafter import GroupedDrafter
    from seer.engine.local.hosted import HostedLocal

    return HostedLocal(
        0,
        str(args.model),
        drafter=GroupedDrafter((), None) if args.mode == "local-drafts" else None,
        pool=None,
        events=lambda event: None,
        kv_memory_bytes=args.kv_gib << 30,
        max_num_seqs=args.max_num_seqs,
        max_waiting=4096,
        max_model_len=6144,
        device=args.device,
    )


class Bench:
    """One engine, and requests through it."""

    def __init__(self, args: argparse.Namespace) -> None:
        self.is_local = args.mode.startswith("local")
        self.instance = local_instance(args) if self.is_local else vllm_instance(args)
        self.args = args
        self.next_request = 0
        self.num_runs = 0
        self.tokens: dict[int, list[int]] = {}
        self.open: set[int] = set()
        self.idle = asyncio.Event()

    def counts(self) -> Counter[str]:
        """Steps, drafts and accepted drafts since the start."""
        found = self.instance.inner.engine if self.is_local else self.instance.counts
        return Counter(num_steps=found.num_steps, num_drafted=found.num_drafted, num_accepted=found.num_accepted)

    def take(self, output: ChunkOutput) -> None:
        if output.span is not None:
            self.tokens[output.request].extend(output.span.ids)
        if output.end is not None:
            assert output.error is None, output.error
            self.open.discard(output.request)
            if not self.open:
                self.idle.set()

    async def begin_run(self) -> None:
        self.num_runs += 1
        past: tuple[Any, ...] = ({},) if self.is_local else ()
        await self.instance.begin_run(f"run-{self.num_runs}", "grouped", 0, *past)

    async def generate(
        self, prompts: list[tuple[int, list[int]]], max_tokens: int, seed: int
    ) -> tuple[float, dict[int, list[int]]]:
        """Seconds until all of (group, prompt) have ended, and their tokens."""
        self.tokens, self.idle = {}, asyncio.Event()
        began_s = time.perf_counter()
        for number, (group, prompt) in enumerate(prompts):
            request, self.next_request = self.next_request, self.next_request + 1
            self.tokens[request] = []
            self.open.add(request)
            self.instance.submit(
                Chunk(
                    request=request,
                    group=group,
                    attempt=0,
                    num_prompt_tokens=len(prompt),
                    num_generated_tokens=0,
                    max_tokens=max_tokens,
                    sampling=Sampling(max_tokens=max_tokens),
                    seed=seed * 100_003 + number,
                    weights_version=0,
                    prompt=prompt,
                )
            )
        await self.idle.wait()
        return time.perf_counter() - began_s, self.tokens


def read_prompts(path: Path) -> list[list[int]]:
    with np.load(path) as trace:
        ends = np.cumsum(trace["prompt_lengths"])
        return [
            trace["prompts"][end - size : end].tolist() for end, size in zip(ends, trace["prompt_lengths"], strict=True)
        ]


async def batches(bench: Bench, prompts: list[list[int]], out: dict[str, Any], deadline_s: float) -> None:
    for size in map(int, bench.args.sizes.split(",")):
        for repetition in range(bench.args.repeats):
            if time.monotonic() > deadline_s:
                return
            await bench.begin_run()
            at = bench.args.first + 7 * repetition
            groups = max(1, size // GROUP)
            chosen = [(g, prompts[(at + g) % len(prompts)]) for g in range(groups) for _ in range(min(size, GROUP))]
            if size < GROUP:
                await bench.generate([chosen[0]] * (GROUP - 1), bench.args.max_tokens, seed=1000 + repetition)
            before = bench.counts()
            seconds, tokens = await bench.generate(chosen, bench.args.max_tokens, seed=repetition)
            num_tokens = sum(map(len, tokens.values()))
            bench_counts = bench.counts()
            bench_counts.subtract(before)
            run = {"tokens_s": num_tokens / seconds, "seconds": seconds, "num_tokens": num_tokens, **bench_counts}
            out.setdefault("batches", {}).setdefault(str(size), []).append(run)
            if repetition == 0 and size == 64:
                out["seeded"] = list(tokens.values())
        print(_batch_line(bench.args.label, size, out["batches"][str(size)]), flush=True)


def _batch_line(label: str, size: int, runs: list[dict[str, Any]]) -> str:
    rates = [run["tokens_s"] for run in runs]
    steps, drafted, accepted = (sum(run[key] for run in runs) for key in ("num_steps", "num_drafted", "num_accepted"))
    step_ms = 1e3 * sum(run["seconds"] for run in runs) / max(1, steps)
    return (
        f"{label} batch {size}: {statistics.median(rates):.0f} tokens/s ({min(rates):.0f} to {max(rates):.0f}), "
        f"{step_ms:.2f} ms a step, {drafted / max(1, steps * size):.1f} drafts, "
        f"{accepted / max(1, drafted):.0%} accepted"
    )


async def rollouts(bench: Bench, prompts: list[list[int]], out: dict[str, Any], deadline_s: float) -> None:
    chosen = [(g, prompts[g]) for g in range(48) for _ in range(GROUP)]
    for repetition in range(bench.args.rollouts):
        if time.monotonic() > deadline_s:
            return
        await bench.begin_run()
        seconds, tokens = await bench.generate(chosen, 4096, seed=repetition)
        num_tokens = sum(map(len, tokens.values()))
        out.setdefault("rollouts", []).append(
            {"tokens_s": num_tokens / seconds, "num_tokens": num_tokens, "seconds": seconds}
        )
        print(
            f"{bench.args.label} rollout: {num_tokens / seconds:.0f} tokens/s, {num_tokens} tokens in {seconds:.1f} s",
            flush=True,
        )


def next_turn(args: argparse.Namespace, deadline_s: float) -> bool:
    """Wait for the file --go and take over the options in it; False if it says `{"end": true}`."""
    if args.go is None:
        return True
    await_turn(args.go, deadline_s - time.monotonic())
    order = json.loads(args.go.read_text() or "{}")
    vars(args).update(order)
    return not order.get("end")


async def run(args: argparse.Namespace) -> None:
    deadline_s = time.monotonic() + args.limit_s
    args.out.mkdir(parents=True, exist_ok=True)
    prompts = read_prompts(args.trace)
    bench = Bench(args)
    began_s = time.monotonic()
    await bench.instance.start(bench.take)
    if not bench.is_local:
        from seer.engine.vllm.engine_start import settle_process

        settle_process()  # as the process that hosts an instance does
    out: dict[str, Any] = {"mode": args.mode, "stamp": print_stamp(args), "start_s": time.monotonic() - began_s}
    print(f"{args.label} started in {out['start_s']:.0f} s", flush=True)
    try:
        await bench.begin_run()
        await bench.generate([(0, prompts[0])] * 32, 64, seed=9)  # compiles what is compiled late
        while await asyncio.to_thread(next_turn, args, deadline_s):
            await batches(bench, prompts, out, deadline_s)
            await rollouts(bench, prompts, out, deadline_s)
            if args.mode == "gpu":
                (out["store"],) = await bench.instance.draft_counts()
                print(out["store"], flush=True)
            print(f"{args.label} done", flush=True)
            (args.out / f"{args.label}.json").write_text(json.dumps(out))
            end_turn(args.go)
            if args.go is None:
                break
    finally:
        (args.out / f"{args.label}.json").write_text(json.dumps(out))
        await bench.instance.close()


def compare(first: Path, second: Path) -> None:
    """Seeded requests of two modes: how many are equal, and where the others part."""
    ours, theirs = (json.loads(path.read_text())["seeded"] for path in (first, second))
    parts = [
        next((i for i, (a, b) in enumerate(zip(x, y, strict=False)) if a != b), None)
        for x, y in zip(ours, theirs, strict=True)
    ]
    print(
        f"{sum(at is None for at in parts)} of {len(parts)} equal; "
        f"the others part at {sorted(at for at in parts if at is not None)}"
    )


def main() -> None:
    options = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    options.add_argument("--model", type=Path)
    options.add_argument("--trace", type=Path, default=QWEN_MIX, help="recorded prompts (%(default)s)")
    options.add_argument("--out", type=Path)
    options.add_argument("--mode", choices=("plain", "gpu", "local", "local-drafts"), default="gpu")
    options.add_argument("--label", help="names the result; the mode")
    options.add_argument("--engine", default="{}", help="JSON, further arguments of vLLM")
    options.add_argument("--sizes", default=",".join(map(str, BATCHES)), help="requests of the batches (%(default)s)")
    options.add_argument("--device", default="cuda", help="cpu only shows that it runs")
    options.add_argument("--max-num-seqs", type=int, default=256)
    options.add_argument("--draft-tokens", type=int, default=8)
    options.add_argument("--fixed-tokens", type=int, help="drafts of every step, instead of the budget's")
    options.add_argument(
        "--first", type=int, default=60, help="first prompt of the batches; rollouts take the first 48"
    )
    options.add_argument("--max-tokens", type=int, default=384)
    options.add_argument("--repeats", type=int, default=3)
    options.add_argument("--rollouts", type=int, default=2)
    options.add_argument(
        "--go", type=Path, help="measure whenever this file is put there (it may hold options, as JSON), then remove it"
    )
    options.add_argument("--kv-gib", type=int, default=60)
    options.add_argument("--limit-s", type=float, default=500.0)
    options.add_argument("--compare", type=Path, nargs=2, metavar="JSON")
    args = options.parse_args()
    args.label = args.label or args.mode
    if args.compare:
        compare(*args.compare)
    else:
        asyncio.run(run(args))


if __name__ == "__main__":
    main()
