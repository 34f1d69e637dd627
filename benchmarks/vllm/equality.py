# SPDX-License-Identifier: Apache-2.0
"""Are the tokens of Seer on vLLM those of plain vLLM? The same seeds with drafts, chunks and moves, and without.

    python benchmarks/vllm/equality.py --model DIR --out DIR [--dtype float32] [--trace FILE.npz] [--groups 125]

One fleet of one plain instance (`verl`, no drafts), and beside it one of two instances with grouped drafts on the GPU
that share a pool (`seer-paper`, short chunks, so that requests move). In float32 all responses should be equal, if all
products are in float32: with TRITON_F32_DEFAULT=ieee and VLLM_FLOAT32_MATMUL_PRECISION=highest in the environment.
Where batches of another shape round otherwise, near_ties.py shows for each response that parts whether the two tokens
were a near tie. DIR/equality-DTYPE.json has what it needs.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import sys
import time
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
sys.path[:0] = [str(ROOT / "src"), str(ROOT / "benchmarks"), str(ROOT / "benchmarks" / "rollout")]

from gpu import read_trace
from partings import Responses, compare
from seer import HostingConfig, Rollout
from stamp import RECORDINGS, print_stamp


async def roll_out(args: argparse.Namespace, *, ours: bool) -> tuple[Responses, dict[str, Any]]:
    prompts, _ = read_trace(args.trace, args)
    context = max(len(prompt.token_ids) for prompt in prompts) + args.max_tokens
    settings: dict[str, Any] = {"engine": {"gpu_memory_utilization": 0.08, "kv_cache_memory_bytes": 8 << 30}}
    if ours:
        settings["speculation"] = {"place": "gpu"}
    async with Rollout(
        args.model,
        engine="vllm",
        device="cuda",
        share_gpus=True,
        dtype=args.dtype,
        instances=2 if ours else 1,
        kv_blocks=args.kv_tokens // 16,
        block_size=16,
        max_num_seqs=args.max_num_seqs,
        max_model_len=context,
        chunk_tokens=args.chunk_tokens if ours else None,
        hosting=HostingConfig(pin_cores=False, silence_deadline_s=120.0, start_deadline_s=300.0),
        engine_settings=settings,
    ) as rollout:
        began_s = time.monotonic()
        scheduler, speculation = ("seer-paper", "auto") if ours else ("verl", "off")
        groups = [g async for g in rollout.run(prompts, scheduler=scheduler, seed=args.seed, speculation=speculation)]
        responses = {(one.group, one.index): one for group in groups for one in group.responses}
        views = [instance.view() for instance in rollout.fleet.instances]
        return responses, {
            "seconds": time.monotonic() - began_s,
            "num_moves": sum(one.num_migrations for one in responses.values()),
            "num_chunks": sum(one.num_chunks for one in responses.values()),
            "num_drafted": sum(view.num_drafted for view in views),
            "num_accepted": sum(view.num_accepted for view in views),
        }


async def run(args: argparse.Namespace) -> None:
    out: dict[str, Any] = {"stamp": print_stamp(args)}
    # At once: the two take most of their time to start.
    (plain, out["plain"]), (ours, out["ours"]) = await asyncio.gather(
        roll_out(args, ours=False), roll_out(args, ours=True)
    )
    prompts, _ = read_trace(args.trace, args)
    out |= compare(plain, ours, {group: prompt.token_ids for group, prompt in enumerate(prompts)})
    args.out.mkdir(parents=True, exist_ok=True)
    (args.out / f"equality-{args.dtype}.json").write_text(json.dumps(out, indent=1))
    shown = {name: out[name] for name in ("num_responses", "num_equal", "num_tokens", "plain", "ours")}
    partings = [(one["request"], one["at"], one["tokens"], one["logprobs"]) for one in out["partings"][:8]]
    print(json.dumps(shown), len(out["partings"]), "partings, the first:", partings, flush=True)


def main() -> None:
    options = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    options.add_argument("--model", required=True, help="a Hugging Face folder")
    options.add_argument(
        "--trace", type=Path, default=RECORDINGS / "smollm2-gsm8k-n16.npz", help="recorded prompts (%(default)s)"
    )
    options.add_argument("--out", type=Path, required=True)
    options.add_argument("--dtype", default="float32")
    options.add_argument("--groups", type=int, default=125)
    options.add_argument("--n", type=int, default=16)
    options.add_argument("--max-tokens", type=int, default=256)
    options.add_argument("--chunk-tokens", type=int, default=48)
    options.add_argument("--max-num-seqs", type=int, default=64)
    options.add_argument("--kv-tokens", type=int, default=64 * 640)
    options.add_argument("--seed", type=int, default=0)
    asyncio.run(run(options.parse_args()))


if __name__ == "__main__":
    main()
