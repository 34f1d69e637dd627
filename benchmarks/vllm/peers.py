# SPDX-License-Identifier: Apache-2.0
"""Stock vLLM without Seer on the rollout of gpu_drafts.py: plain, as TRL calls it, and with its own drafters.

    python benchmarks/vllm/peers.py --model DIR --out DIR --mode plain|trl|ngram|ngram_gpu|suffix [--go FILE]

All requests are given to `LLM.generate` at once. `plain` asks for neither log-probabilities nor text; `trl` for both,
as TRL's colocated vLLM does. The drafters are vLLM's own, with as many tokens as `--draft-tokens`, and ask for nothing.
`suffix` needs `arctic_inference` on PYTHONPATH (pack_suffix.py). DIR/peer-LABEL.json has every rollout.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from pathlib import Path
from typing import Any

import numpy as np

ROOT = Path(__file__).resolve().parents[2]
sys.path[:0] = [str(ROOT / "src"), str(ROOT / "benchmarks"), str(ROOT / "benchmarks" / "vllm")]

from gpu_drafts import GROUP, read_prompts

from stamp import QWEN_MIX, print_stamp
from turns import await_turn, end_turn

GROUPS = 48
BLOCK_SIZE = 16


def speculative_config(args: argparse.Namespace) -> dict[str, Any] | None:
    """vLLM's configuration of a drafter."""
    if args.mode in ("plain", "trl"):
        return None
    found: dict[str, Any] = {"method": args.mode, "num_speculative_tokens": args.draft_tokens}
    if args.mode.startswith("ngram"):
        found |= {"prompt_lookup_min": 2, "prompt_lookup_max": 4}
    return found


def kv_memory(args: argparse.Namespace) -> dict[str, int]:
    """vLLM keeps one block for itself."""
    given = {"kv_cache_memory_bytes": args.kv_gib << 30}  # then vLLM does not look at the memory of others
    if args.kv_tokens is None:
        return given
    return given | {"num_gpu_blocks_override": -(-args.kv_tokens // BLOCK_SIZE) + 1, "block_size": BLOCK_SIZE}


def recorded_lengths(args: argparse.Namespace) -> list[int]:
    """As rollout/gpu.py forces them."""
    with np.load(args.trace) as trace:
        found = np.clip(trace["lengths"][:GROUPS, :GROUP], 1, args.max_tokens)
    return [int(length) for length in found.ravel()]


def run(args: argparse.Namespace) -> None:
    from vllm import LLM, SamplingParams

    out: dict[str, Any] = {"mode": args.mode, "stamp": print_stamp(args), "rollouts": []}
    llm = LLM(
        model=str(args.model),
        max_model_len=6144,
        max_num_seqs=args.max_num_seqs,
        **kv_memory(args),
        gpu_memory_utilization=0.08,
        generation_config="vllm",
        logprobs_mode="processed_logprobs",
        speculative_config=speculative_config(args),
    )
    prompts = read_prompts(args.trace)[:GROUPS]
    asked = [{"prompt_token_ids": prompt} for prompt in prompts for _ in range(GROUP)]
    lengths = recorded_lengths(args) if args.lengths == "forced" else [args.max_tokens] * len(asked)
    print(f"{args.mode} started", flush=True)
    for repetition in range(args.rollouts):
        await_turn(args.go, args.limit_s)
        is_trl = args.mode == "trl" or (args.go is not None and "trl" in args.go.read_text())
        params = [
            SamplingParams(
                max_tokens=lengths[number],
                ignore_eos=args.lengths == "forced",
                temperature=1.0,
                seed=100_003 * repetition + number,
                logprobs=0 if is_trl else None,
                detokenize=is_trl,
            )
            for number in range(len(asked))
        ]
        began_s = time.perf_counter()
        made = llm.generate(asked, params, use_tqdm=False)
        seconds = time.perf_counter() - began_s
        num_tokens = sum(len(one.outputs[0].token_ids) for one in made)
        out["rollouts"].append(
            {"tokens_s": num_tokens / seconds, "num_tokens": num_tokens, "seconds": seconds, "is_trl": is_trl}
        )
        args.out.mkdir(parents=True, exist_ok=True)
        (args.out / f"peer-{args.label}.json").write_text(json.dumps(out, indent=1))
        print(f"peer {args.label}: {num_tokens / seconds:.0f} tokens/s, {num_tokens} in {seconds:.1f} s", flush=True)
        end_turn(args.go)


def main() -> None:
    options = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    options.add_argument("--model", type=Path, required=True)
    options.add_argument("--out", type=Path, required=True)
    options.add_argument("--mode", choices=("plain", "trl", "ngram", "ngram_gpu", "suffix"), required=True)
    options.add_argument("--trace", type=Path, default=QWEN_MIX, help="recorded prompts (%(default)s)")
    options.add_argument("--lengths", choices=("natural", "forced"), default="natural")
    options.add_argument("--draft-tokens", type=int, default=4)
    options.add_argument("--max-tokens", type=int, default=4096)
    options.add_argument("--max-num-seqs", type=int, default=256)
    options.add_argument("--rollouts", type=int, default=2)
    options.add_argument("--kv-gib", type=int, default=16)
    options.add_argument("--kv-tokens", type=int, help="KV memory in tokens, instead of --kv-gib")
    options.add_argument("--label", help="names the result; the mode")
    options.add_argument(
        "--go",
        type=Path,
        help="each rollout waits for this file (with the word trl in it: as TRL) and removes it: engines take turns",
    )
    options.add_argument("--limit-s", type=float, default=500.0)
    args = options.parse_args()
    args.label = args.label or args.mode
    run(args)


if __name__ == "__main__":
    main()
