# SPDX-License-Identifier: Apache-2.0
"""Make a recording: groups of responses that a model samples for your prompts, in the .npz form of this folder.

    seer model get smollm2
    python benchmarks/recordings/record.py --model smollm2 --prompts examples/prompts/mixed.jsonl --out recording.npz
    python benchmarks/recordings/record.py --model FOLDER --engine vllm --device cuda --prompts FILE --out recording.npz

Every benchmark that takes --trace or --recording, and `seer drafts replay`, read the file. Speculation is off: it does
not change tokens, and a recording needs none. The stamp is in the file, as JSON in the array `stamp`.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

ROOT = Path(__file__).resolve().parents[2]
sys.path[:0] = [str(ROOT / "src"), str(ROOT / "benchmarks")]

from seer import Rollout, Sampling
from seer.runs.prompts import read_prompts
from stamp import print_stamp


async def sample(args: argparse.Namespace) -> tuple[list[Sequence[int]], list[list[list[int]]]]:
    """The prompts as tokens, and the tokens of the responses to each."""
    good, bad = read_prompts(args.prompts)
    if bad:
        raise SystemExit(f"{args.prompts}: {bad[0]}")
    sampling = Sampling(max_tokens=args.max_tokens, temperature=args.temperature)
    async with Rollout(
        args.model,
        engine=args.engine,
        device=args.device,
        instances=args.instances,
        max_num_seqs=args.max_num_seqs,
        speculation="off",
    ) as rollout:
        prompts = rollout.encode(good[: args.groups], n=args.n, sampling=sampling)
        responses: list[list[list[int]]] = [[] for _ in prompts]
        async for group in rollout.run(prompts, seed=args.seed):
            ordered = sorted(group.responses, key=lambda response: response.index)
            responses[group.group] = [response.token_ids for response in ordered]
            print(f"group {group.group}: {[len(tokens) for tokens in responses[group.group]]} tokens", flush=True)
    return [prompt.token_ids for prompt in prompts], responses


def write(path: Path, prompts: list[Sequence[int]], responses: list[list[list[int]]], stamp: dict[str, Any]) -> None:
    """Write the recording: groups x responses lengths, and all tokens in one array."""
    np.savez_compressed(
        path,
        lengths=np.array([[len(tokens) for tokens in group] for group in responses], np.int32),
        tokens=np.concatenate([tokens for group in responses for tokens in group]).astype(np.int32),
        prompt_lengths=np.array([len(tokens) for tokens in prompts], np.int32),
        prompts=np.concatenate(prompts).astype(np.int32),
        stamp=np.array(json.dumps(stamp)),
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "--model", default="smollm2", help="a model folder, or a name of `seer model get` (%(default)s)"
    )
    parser.add_argument("--prompts", type=Path, default=ROOT / "examples" / "prompts" / "mixed.jsonl")
    parser.add_argument("--out", type=Path, required=True, help="the .npz to write")
    parser.add_argument("--groups", type=int, help="only the first prompts")
    parser.add_argument("--n", type=int, default=16, help="responses per prompt (%(default)s)")
    parser.add_argument("--max-tokens", type=int, default=640)
    parser.add_argument("--temperature", type=float, default=1.0)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--engine", default="local", choices=("local", "vllm"))
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--instances", type=int, default=1)
    parser.add_argument("--max-num-seqs", type=int, default=16)
    args = parser.parse_args()
    stamp = print_stamp(args)
    prompts, responses = asyncio.run(sample(args))
    args.out.parent.mkdir(parents=True, exist_ok=True)
    write(args.out, prompts, responses, stamp)
    print(f"{args.out}: {len(prompts)} groups of {args.n}")


if __name__ == "__main__":
    main()
