# SPDX-License-Identifier: Apache-2.0
"""Where a step of stock vLLM spends its time when drafts come from an external drafter. Needs a GPU.

    python benchmarks/vllm/step_profile.py --out DIR [--batches 1,8,64] [--shape qwen2.5-7b] [--only plain,uniform]

Each way of running vLLM has its own process with the engine inside, so that PyTorch's profiler sees it. All start
together and are then measured one at a time. The weights are random (`--shape`), so drafts of random tokens are never
accepted and every step gives one token per request: seconds per token are seconds per step.

The ways
    plain         vLLM as installed: its newest runner, asynchronous scheduling, full CUDA graphs
    runner-v1     the same on the first runner, the only one that takes drafts from outside
    synchronous   that, without asynchronous scheduling
    none          an external drafter that never drafts
    uniform       an external drafter that always drafts K tokens for every request
    ragged        an external drafter that drafts 0 to K tokens, another number for each request
    ngram         vLLM's own n-gram drafter
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from stamp import print_stamp, take_stamp
from turns import await_turn

WAYS = ("plain", "runner-v1", "synchronous", "none", "uniform", "ragged", "ngram")
COMMON: dict[str, Any] = {
    "architectures": ["Qwen2ForCausalLM"], "model_type": "qwen2", "max_position_embeddings": 32768,
    "rms_norm_eps": 1e-6, "rope_theta": 1000000.0, "torch_dtype": "bfloat16", "hidden_act": "silu",
    "bos_token_id": 151643, "eos_token_id": 151645,
}  # fmt: skip
SHAPES: dict[str, dict[str, Any]] = {
    "qwen2.5-1.5b": COMMON | {
        "hidden_size": 1536, "intermediate_size": 8960, "num_hidden_layers": 28, "num_attention_heads": 12,
        "num_key_value_heads": 2, "vocab_size": 151936, "tie_word_embeddings": True,
    },
    "qwen2.5-7b": COMMON | {
        "hidden_size": 3584, "intermediate_size": 18944, "num_hidden_layers": 28, "num_attention_heads": 28,
        "num_key_value_heads": 4, "vocab_size": 152064, "tie_word_embeddings": False,
    },
    "qwen2.5-14b": COMMON | {
        "hidden_size": 5120, "intermediate_size": 13824, "num_hidden_layers": 48, "num_attention_heads": 40,
        "num_key_value_heads": 8, "vocab_size": 152064, "tie_word_embeddings": False,
    },
}  # fmt: skip
PROMPT_TOKENS, NEW_TOKENS, PROFILED_TOKENS = 128, 160, 24
START_LIMIT_S = 300.0


class Drafter:
    """vLLM's `custom_class` interface. Environment variables of its process say what it drafts."""

    def __init__(self, vllm_config: Any) -> None:
        self.k = int(os.environ["SEER_PROFILE_K"])
        self.way = os.environ["SEER_PROFILE_WAY"]
        self.turn = 0

    def load_model(self, *args: Any, **kwargs: Any) -> None:
        """Nothing to load."""

    def propose(self, sampled: list[list[int]], *args: Any, **kwargs: Any) -> list[list[int]]:
        self.turn += 1
        if self.way == "none":
            return [[] for _ in sampled]
        lengths = [self.k if self.way == "uniform" else (self.turn + row) % (self.k + 1) for row in range(len(sampled))]
        return [
            [1000 + (self.turn * 7 + row * 13 + i) % 50000 for i in range(length)] if ids else []
            for row, (ids, length) in enumerate(zip(sampled, lengths, strict=True))
        ]


def measure(way: str, args: argparse.Namespace, out: Path) -> None:
    """In its own process: start, touch the ready file, wait for the go file, measure."""
    os.environ.update(VLLM_ENABLE_V1_MULTIPROCESSING="0", SEER_PROFILE_K=str(args.draft_tokens), SEER_PROFILE_WAY=way)
    if way in ("runner-v1", "synchronous"):
        os.environ["VLLM_USE_V2_MODEL_RUNNER"] = "0"
    sys.path.insert(0, str(Path(__file__).parent))
    import torch
    from vllm import LLM, SamplingParams

    settings: dict[str, Any] = {}
    if way == "synchronous":
        settings["async_scheduling"] = False
    if way in ("none", "uniform", "ragged"):
        settings["speculative_config"] = {
            "method": "custom_class",
            "model": "step_profile.Drafter",
            "num_speculative_tokens": args.draft_tokens,
        }
    if way == "ngram":
        settings["speculative_config"] = {
            "method": "ngram",
            "num_speculative_tokens": args.draft_tokens,
            "prompt_lookup_max": 4,
            "prompt_lookup_min": 2,
        }
    model = out / "shape"
    began = time.perf_counter()
    llm = LLM(
        model=str(model),
        load_format="dummy",
        skip_tokenizer_init=True,
        kv_cache_memory_bytes=4 << 30,  # gpu_memory_utilization would count other processes
        gpu_memory_utilization=0.25,  # what must be free at the start
        max_model_len=2048,
        max_num_seqs=max(args.batches),
        **settings,
    )
    started_s = time.perf_counter() - began
    (out / f"{way}.ready").touch()
    while not (out / f"{way}.go").exists():
        time.sleep(0.05)
    result: dict[str, Any] = {"stamp": take_stamp(args), "way": way, "started_s": started_s, "batches": {}}

    def generate(batch: int, tokens: int) -> float:
        prompts = [
            {"prompt_token_ids": [(17 * r + 31 * i) % 9000 + 5 for i in range(PROMPT_TOKENS)]} for r in range(batch)
        ]
        params = SamplingParams(temperature=1.0, max_tokens=tokens, ignore_eos=True, detokenize=False)
        begin = time.perf_counter()
        llm.generate(prompts, params, use_tqdm=False)
        return time.perf_counter() - begin

    for batch in args.batches:
        generate(batch, 16)
        runs = []
        for _ in range(3):
            short, long = generate(batch, 32), generate(batch, 32 + NEW_TOKENS)
            runs.append((long - short) / NEW_TOKENS * 1e3)
        entry: dict[str, Any] = {"step_ms": sorted(runs)[1], "runs_ms": runs}
        with torch.profiler.profile() as profile:
            generate(batch, PROFILED_TOKENS)
        entry["profile"] = digest(profile, PROFILED_TOKENS)
        result["batches"][batch] = entry
        (out / f"{way}.json").write_text(json.dumps(result, indent=1))
    (out / f"{way}.done").touch()


def digest(profile: Any, num_steps: int) -> dict[str, Any]:
    """Time on the GPU per step, and the host calls that launched it."""
    averages = profile.key_averages()
    gpu_us = sum(event.self_device_time_total for event in averages)
    host = {
        event.key: (round(event.count / num_steps, 1), round(event.self_cpu_time_total / num_steps))
        for event in averages
        if event.key.startswith("cu") and event.self_cpu_time_total > 0
    }
    hottest = sorted(averages, key=lambda event: -event.self_device_time_total)[:12]
    slowest = sorted(averages, key=lambda event: -event.self_cpu_time_total)[:25]
    return {
        "gpu_us_per_step": round(gpu_us / num_steps),
        "host_calls_per_step": host,
        "kernels": [
            (e.key[:80], round(e.count / num_steps, 1), round(e.self_device_time_total / num_steps)) for e in hottest
        ],
        "host_ops": [
            (e.key[:80], round(e.count / num_steps, 1), round(e.self_cpu_time_total / num_steps)) for e in slowest
        ],
    }


def main() -> int:
    options = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    options.add_argument("--out", type=Path, required=True)
    options.add_argument("--batches", default="1,8,64", type=lambda text: [int(b) for b in text.split(",")])
    options.add_argument("--draft-tokens", type=int, default=4)
    options.add_argument("--shape", choices=tuple(SHAPES), default="qwen2.5-1.5b", help="%(default)s")
    options.add_argument("--only", default=",".join(WAYS))
    options.add_argument("--go", type=Path, help="start measuring when this file exists")
    options.add_argument("--way", help="measure this one here (used by the script itself)")
    args = options.parse_args()
    args.out.mkdir(parents=True, exist_ok=True)
    (args.out / "shape").mkdir(exist_ok=True)
    (args.out / "shape" / "config.json").write_text(json.dumps(SHAPES[args.shape]))
    if args.way:
        measure(args.way, args, args.out)
        return 0
    print_stamp(args)
    ways = args.only.split(",")
    again = [sys.executable, __file__, "--out", str(args.out), "--batches", ",".join(map(str, args.batches))]
    processes = {}
    for way in ways:
        log = (args.out / f"{way}.log").open("w")
        command = [*again, "--shape", args.shape, "--draft-tokens", str(args.draft_tokens), "--way", way]
        processes[way] = subprocess.Popen(command, stdout=log, stderr=subprocess.STDOUT)
    began = time.monotonic()
    while any(not (args.out / f"{way}.ready").exists() and p.poll() is None for way, p in processes.items()):
        if time.monotonic() - began > START_LIMIT_S:
            break
        time.sleep(0.2)
    (args.out / "engines.ready").touch()
    await_turn(args.go, START_LIMIT_S)
    for way, process in processes.items():
        if process.poll() is not None or not (args.out / f"{way}.ready").exists():
            print(f"{way}: did not start; see its log", flush=True)
            process.kill()
            continue
        (args.out / f"{way}.go").touch()
        process.wait(120)
        if (args.out / f"{way}.json").exists():
            found = json.loads((args.out / f"{way}.json").read_text())
            steps = "  ".join(
                f"B{b}: {e['step_ms']:.2f} ms (GPU {e['profile']['gpu_us_per_step'] / 1e3:.2f})"
                for b, e in found["batches"].items()
            )
            print(f"{way:12s} started in {found['started_s']:.0f} s   {steps}", flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
