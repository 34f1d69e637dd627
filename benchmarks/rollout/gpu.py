# SPDX-License-Identifier: Apache-2.0
"""Rollouts on one GPU: verl's dispatch against Seer and its parts, with one instance and with several under MPS.

    python benchmarks/rollout/gpu.py --model DIR --out DIR [--trace FILE.npz] [--engine vllm] [--limit-s 540]

Prompts (and, with --lengths forced, the lengths of the responses) come from a recording (../recordings/README.md): an
.npz with `prompts` (concatenated token ids), `prompt_lengths` and `lengths` (groups x responses). Its token ids must be
those of the model: the default recording is for Qwen2.5 models. Every scheduler gets the same prompts and seeds. KV
memory is limited to --kv-share of what all running requests could fill, so a scheduler that starts more than fits
causes preemptions. Instances share the GPU under MPS, each with an equal part of its threads. Without MPS they would
take turns, and an idle instance's share would go to the others.

`NAME/off` among the schedulers is that scheduler without drafts.

DIR/gpu.json is written after each run: measured numbers, where the time went, the fitted step cost, and what the
simulator predicts for the recorded lengths at that step cost. DIR/gpu.md has the tables. Runs that no longer fit into
--limit-s are skipped and named. Run it once per engine. Where a call must be short, use --instances 1 and --instances 4
in two calls.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import json
import os
import subprocess
import sys
import tempfile
import time
import traceback
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np

ROOT = Path(__file__).resolve().parents[2]
sys.path[:0] = [str(ROOT / "src"), str(ROOT / "benchmarks")]

from measure import Ledger, measure, table

from seer import HostingConfig, Rollout, Sampling
from seer.runs.prompts import EncodedPrompt, Prompt
from stamp import QWEN_MIX, as_text, print_stamp

SCHEDULERS = "verl-sync,verl,divided,context,seer"
BLOCK_SIZE = 16


def read_trace(path: Path, args: argparse.Namespace) -> tuple[list[EncodedPrompt], list[list[int]]]:
    """The first groups of the recording, in recorded order, and the lengths of their responses."""
    with np.load(path) as trace:
        counts = trace["prompt_lengths"][: args.groups]
        ends = np.cumsum(counts)
        tokens = trace["prompts"]
        ids = [tokens[end - count : end].tolist() for end, count in zip(ends, counts, strict=True)]
        lengths = np.minimum(trace["lengths"][: args.groups, : args.n], args.max_tokens)
    sampling = Sampling(max_tokens=args.max_tokens)
    prompts = [
        EncodedPrompt(Prompt(id=f"trace-{i}", token_ids=tuple(one)), tuple(one), sampling, args.n)
        for i, one in enumerate(ids)
    ]
    return prompts, np.maximum(lengths, 1).tolist()


@contextlib.contextmanager
def sharing_the_gpu(num_instances: int) -> Iterator[dict[str, Any]]:
    """Start MPS for the child processes if several share the GPU. Yields what was started."""
    if num_instances == 1:
        yield {"mps": False}
        return
    folder = tempfile.mkdtemp(prefix="seer-mps-")
    share = max(1, 100 // num_instances)
    own = {
        "CUDA_MPS_PIPE_DIRECTORY": f"{folder}/pipe",
        "CUDA_MPS_LOG_DIRECTORY": f"{folder}/log",
        "CUDA_MPS_ACTIVE_THREAD_PERCENTAGE": str(share),
    }
    for name in ("pipe", "log"):
        os.makedirs(f"{folder}/{name}")
    os.environ.update(own)
    try:
        started = subprocess.run(["nvidia-cuda-mps-control", "-d"], check=False, capture_output=True, text=True)
        is_up = started.returncode == 0
    except FileNotFoundError:
        is_up = False
    if not is_up:
        for name in own:
            os.environ.pop(name)
    try:
        yield {"mps": is_up, "thread_percentage": share if is_up else None}
    finally:
        if is_up:
            subprocess.run(["nvidia-cuda-mps-control"], input="quit\n", text=True, check=False, timeout=60)
        for name in own:
            os.environ.pop(name, None)


async def run(args: argparse.Namespace, num_instances: int, label: dict[str, Any], ledger: Ledger) -> None:
    prompts, recorded = read_trace(args.trace, args)
    context = max(len(prompt.token_ids) for prompt in prompts) + args.max_tokens
    mean = sum(map(sum, recorded)) / sum(map(len, recorded)) + sum(len(p.token_ids) for p in prompts) / len(prompts)
    kv_tokens = args.kv_tokens or int(args.kv_share * args.max_num_seqs * mean)
    kv_blocks = -(-max(kv_tokens, context + BLOCK_SIZE) // BLOCK_SIZE)
    settings: dict[str, Any] = json.loads(args.engine_settings)
    if args.engine == "vllm":
        # KV memory is given in blocks. This is only the share of the GPU that must be free at the start.
        settings.setdefault("engine", {"gpu_memory_utilization": 0.08})
    began_s = time.monotonic()
    async with Rollout(
        args.model,
        engine=args.engine,
        device=args.device,
        instances=num_instances,
        share_gpus=True,
        kv_blocks=kv_blocks,
        block_size=BLOCK_SIZE,
        max_num_seqs=args.max_num_seqs,
        max_model_len=context,
        pool_bytes=args.pool_bytes,
        hosting=HostingConfig(
            pin_cores=False, silence_deadline_s=60.0, start_deadline_s=300.0, log_dir=args.out / "logs"
        ),
        engine_settings=settings,
    ) as rollout:
        limits = rollout.fleet.instances[0].limits
        label |= {
            "kv_tokens": limits.kv_tokens,
            "max_num_seqs": limits.max_num_seqs,
            "start_s": time.monotonic() - began_s,
        }
        print(f"{num_instances} instances up in {label['start_s']:.0f} s, KV of {limits.kv_tokens} tokens", flush=True)
        (args.out / "fleet.ready").touch()
        lengths = recorded if args.lengths == "forced" else None
        await measure(
            rollout,
            prompts,
            args.schedulers.split(","),
            ledger,
            label=label,
            repeat=args.repeat,
            lengths=lengths,
            predict=not args.skip_prediction,
            weights=args.weights,
            go=args.go,
        )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", required=True, help="a Hugging Face folder")
    parser.add_argument("--trace", type=Path, default=QWEN_MIX, help="a recording, for its prompts and lengths")
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--engine", default="vllm", choices=("vllm", "local"))
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--instances", default="1,4")
    parser.add_argument("--groups", type=int, default=48)
    parser.add_argument("--n", type=int, default=8)
    parser.add_argument("--max-tokens", type=int, default=4096)
    parser.add_argument("--max-num-seqs", type=int, default=64, help="of each instance")
    parser.add_argument("--kv-share", type=float, default=0.5, help="KV memory over what full batches of the mean need")
    parser.add_argument("--kv-tokens", type=int, help="KV memory of each instance, instead of --kv-share")
    parser.add_argument("--pool-bytes", type=int, default=16 << 30)
    parser.add_argument("--schedulers", default=SCHEDULERS)
    parser.add_argument("--lengths", choices=("natural", "forced"), default="natural")
    parser.add_argument("--repeat", type=int, default=1)
    parser.add_argument("--engine-settings", default="{}", help="JSON, handed to the engine")
    parser.add_argument("--weights", type=Path, help="folder of the weights that every run loads; the model's")
    parser.add_argument("--skip-prediction", action="store_true", help="do not simulate each run after it")
    parser.add_argument("--go", type=Path, help="each run waits for this file and removes it: fleets take turns")
    parser.add_argument("--limit-s", type=float, default=540.0)
    args = parser.parse_args()
    ledger = Ledger(args.out / "gpu.json", args.limit_s, print_stamp(args))
    for num_instances in map(int, args.instances.split(",")):
        try:
            with sharing_the_gpu(num_instances) as how:
                label = {"instances": num_instances, "engine": args.engine, "lengths": args.lengths, **how}
                asyncio.run(run(args, num_instances, label, ledger))
        except Exception:  # keep the numbers so far, and try the next number of instances
            traceback.print_exc()
            ledger.content.setdefault("errors", []).append(traceback.format_exc())
            ledger.save()
    lines = [as_text(ledger.content["stamp"]) + "\n"]
    for num_instances in dict.fromkeys(run["instances"] for run in ledger.content["runs"]):
        runs = [run for run in ledger.content["runs"] if run["instances"] == num_instances]
        lines += [f"### {num_instances} instances, {args.lengths} lengths\n", table(runs, args.schedulers.split(","))]
    (args.out / "gpu.md").write_text("\n".join(lines))
    print("\n".join(lines))


if __name__ == "__main__":
    main()
