# SPDX-License-Identifier: Apache-2.0
"""A model of Moonlight's shape (16B parameters, 3B active, MLA, experts) in vLLM: KV bytes, steps, moves. Needs a GPU.

    python benchmarks/vllm/moonlight_shape.py --out DIR [--draft-tokens 4] [--limit-s 500]
    python benchmarks/vllm/moonlight_shape.py --out DIR --tiny          # a small shape on a CPU: does it run?

Weights are made up (vLLM's `dummy` format), so nothing is downloaded and tokens mean nothing. One engine, through
Seer's own instance and connector.

    bytes per token   KV of a token over all layers, beside what heads with their own keys and values would take
    steps             milliseconds of a decode step by number of requests; with --draft-tokens K also of steps that
                      verify K drafts of each (random ones: none is accepted)
    moves             a context of C tokens that is in the pool and not in the engine: milliseconds to the next token
                      when its KV is loaded, and when it is computed again; and milliseconds to save it
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import json
import random
import statistics
import sys
import time
import uuid
from collections.abc import Iterator
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
sys.path[:0] = [str(ROOT / "src"), str(ROOT / "benchmarks")]

from seer.config import VllmSpeculation
from seer.speculation.step_report import StepReport
from seer.types import Chunk, ChunkOutput, Sampling, TokenSpan
from stamp import print_stamp
from turns import await_turn, end_turn

MOONLIGHT: dict[str, Any] = {
    "architectures": ["DeepseekV3ForCausalLM"], "model_type": "deepseek_v3", "torch_dtype": "bfloat16",
    "vocab_size": 163840, "hidden_size": 2048, "intermediate_size": 11264, "moe_intermediate_size": 1408,
    "num_hidden_layers": 27, "num_attention_heads": 16, "num_key_value_heads": 16, "n_shared_experts": 2,
    "n_routed_experts": 64, "num_experts_per_tok": 6, "routed_scaling_factor": 2.446, "kv_lora_rank": 512,
    "q_lora_rank": None, "qk_rope_head_dim": 64, "qk_nope_head_dim": 128, "v_head_dim": 128,
    "topk_method": "noaux_tc", "scoring_func": "sigmoid", "n_group": 1, "topk_group": 1, "norm_topk_prob": True,
    "moe_layer_freq": 1, "first_k_dense_replace": 1, "num_nextn_predict_layers": 0, "hidden_act": "silu",
    "max_position_embeddings": 8192, "rms_norm_eps": 1e-5, "rope_theta": 50000.0, "attention_bias": False,
    "tie_word_embeddings": False, "bos_token_id": 163584, "eos_token_id": 163585,
}  # fmt: skip
TINY = MOONLIGHT | {
    "torch_dtype": "float32", "vocab_size": 512, "hidden_size": 64, "intermediate_size": 96,
    "moe_intermediate_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 4,
    "n_routed_experts": 8, "num_experts_per_tok": 2, "n_shared_experts": 1, "qk_nope_head_dim": 32, "v_head_dim": 32,
    "max_position_embeddings": 512, "bos_token_id": 1, "eos_token_id": 2,
}  # fmt: skip
GENERATED = 32
"""Tokens that a request has generated when it moves."""


class Bench:
    """One engine with a pool, and requests through it."""

    def __init__(self, folder: Path, pool: dict[str, Any], args: argparse.Namespace) -> None:
        from seer.engine.vllm.instance import VllmInstance
        from seer.engine.vllm.settings import VllmSettings

        place = "scheduler" if args.tiny else "gpu"
        drafts = None
        if args.draft_tokens:
            fixed = None if args.tiny else args.draft_tokens  # nothing is accepted, so the budget would draft nothing
            drafts = VllmSpeculation(place=place, max_draft_tokens=args.draft_tokens, fixed_tokens=fixed)
        self.instance = VllmInstance(
            0,
            VllmSettings(
                model_dir=str(folder),
                max_num_seqs=max(args.batches),
                max_model_len=args.max_model_len,
                block_size=args.block_size,
                kv_memory_bytes=args.kv_bytes,
                dtype="float32" if args.tiny else "bfloat16",
                device="cpu" if args.tiny else "cuda",
                stream_tokens=1,
                speculation=drafts,
                pool=pool,
                # The share of memory that must be free at the start; KV memory is given in bytes.
                engine={"load_format": "dummy", "gpu_memory_utilization": 0.02 if args.tiny else 0.3},
            ),
            max_waiting=4096,
        )
        self.vocab_size = self.instance.folder.vocab_size
        self.random = random.Random(0)
        self.num_requests = 0
        self.outputs: dict[int, list[TokenSpan]] = {}
        self.first_s: dict[int, float] = {}
        self.ended: dict[int, asyncio.Event] = {}

    def take(self, output: ChunkOutput) -> None:
        assert output.error is None, output.error
        if output.span is not None:
            self.first_s.setdefault(output.request, time.perf_counter())
            self.outputs[output.request].append(output.span)
        if output.end is not None:
            self.ended[output.request].set()

    def prompt(self, num_tokens: int) -> list[int]:
        return [self.random.randrange(3, self.vocab_size) for _ in range(num_tokens)]

    async def chunk(self, prompt: list[int], num_tokens: int, request: int | None = None, **more: Any) -> int:
        """Run one chunk to its end; `request` continues with what it has generated. Returns the request."""
        if request is None:
            request, self.num_requests = self.num_requests, self.num_requests + 1
        spans = tuple(self.outputs.get(request, ()))
        self.first_s.pop(request, None)
        self.outputs[request], self.ended[request] = list(spans), asyncio.Event()
        generated = sum(len(span.ids) for span in spans)
        self.instance.submit(
            Chunk(
                request=request,
                group=request,
                attempt=len(spans),
                num_prompt_tokens=len(prompt),
                num_generated_tokens=generated,
                max_tokens=num_tokens,
                sampling=Sampling(max_tokens=generated + 2 * num_tokens, ignore_eos=True),
                seed=request,
                weights_version=0,
                prompt=prompt,
                spans=spans,
                **more,
            )
        )
        await self.ended[request].wait()
        return request


async def step_costs(bench: Bench, batch: int, args: argparse.Namespace) -> dict[str, float]:
    """Steps in which all requests decode, and nothing else happens."""
    reports: list[StepReport] = []
    bench.instance.counts.on_step = reports.append
    prompts = [bench.prompt(args.prompt_tokens) for _ in range(batch)]
    await asyncio.gather(*(bench.chunk(prompt, args.new_tokens, load_kv=False) for prompt in prompts))
    bench.instance.counts.on_step = None
    steady = [r for r in reports if r.num_running == batch and not r.num_prefill_tokens and not r.load_s]
    if not steady:
        return {"num_steps": 0}
    return {
        "num_steps": len(steady),
        "ms": 1e3 * statistics.median(r.duration_s for r in steady),
        "tokens_per_step": statistics.mean(r.num_emitted for r in steady),
        "drafted_per_step": statistics.mean(r.num_drafted for r in steady),
    }


async def move_costs(bench: Bench, context: int) -> dict[str, float]:
    """Milliseconds to the next token of a context that the engine has forgotten, loaded and computed."""
    times: dict[bool, list[float]] = {True: [], False: []}
    found: dict[str, float] = {}
    for _ in range(3):
        prompt = bench.prompt(context - GENERATED)
        before = await bench.instance.pool_counts()
        request = await bench.chunk(prompt, GENERATED)
        await bench.instance.settle_saves()
        saved = await bench.instance.pool_counts()
        for load_kv in (True, False):
            await bench.instance._started().reset_prefix_cache()
            began_s = time.perf_counter()
            await bench.chunk(prompt, 4, request, load_kv=load_kv)
            times[load_kv].append(1e3 * (bench.first_s[request] - began_s))
        after = await bench.instance.pool_counts()
        found = {
            "saved_blocks": saved.get("saved_blocks", 0) - before.get("saved_blocks", 0),
            "save_ms": 1e3 * (saved.get("save_s", 0) - before.get("save_s", 0)),
            "loaded_blocks": after.get("loaded_blocks", 0) - saved.get("loaded_blocks", 0),
            "load_ms": 1e3 * (after.get("load_s", 0) - saved.get("load_s", 0)),
        }
    return {"loaded_ms": statistics.median(times[True]), "computed_ms": statistics.median(times[False])} | found


def kv_bytes(folder: Path, args: argparse.Namespace) -> dict[str, int]:
    from seer.engine.vllm.model_folder import read_folder

    model, value_bytes = read_folder(folder), 4 if args.tiny else 2
    shape = TINY if args.tiny else MOONLIGHT
    heads = shape["num_attention_heads"] * (shape["qk_nope_head_dim"] + shape["qk_rope_head_dim"] + shape["v_head_dim"])
    return {
        "bytes_per_token": model.block_bytes(args.block_size, value_bytes) // args.block_size,
        "bytes_per_token_of_heads": shape["num_hidden_layers"] * heads * value_bytes,
    }


@contextlib.contextmanager
def a_pool(args: argparse.Namespace, block_bytes: int) -> Iterator[dict[str, Any]]:
    from seer.kvpool.local import LocalPool
    from seer.kvpool.local_files import LocalPoolConfig

    settings = {"name": f"moonlight-{uuid.uuid4().hex[:8]}", "block_bytes": block_bytes, "dram_bytes": args.pool_bytes}
    with LocalPool(LocalPoolConfig(populate=False, **settings)) as pool:
        try:
            yield {"backend": "local", "populate": False, **settings}
        finally:
            pool.close(remove=True)


async def measure(folder: Path, out: dict[str, Any], args: argparse.Namespace) -> None:
    ends_s = time.monotonic() + args.limit_s
    with a_pool(args, out["kv"]["bytes_per_token"] * args.block_size) as pool:
        bench = Bench(folder, pool, args)
        await bench.instance.start(bench.take)
        out["start_s"] = args.limit_s - (ends_s - time.monotonic())
        try:
            print(f"started in {out['start_s']:.0f} s", flush=True)
            await asyncio.to_thread(await_turn, args.go, ends_s - time.monotonic())
            await bench.instance.begin_run("moonlight", "none", 0)
            await measure_moves(bench, out, args, ends_s)
            await measure_steps(bench, out["steps"], args, ends_s)
            if args.draft_tokens:
                await bench.instance.begin_run("drafts", "grouped", 0)
                await measure_steps(bench, out["steps_with_drafts"], args, ends_s)
        finally:
            end_turn(args.go)
            await bench.instance.close()


async def measure_moves(bench: Bench, out: dict[str, Any], args: argparse.Namespace, ends_s: float) -> None:
    for context in args.contexts:
        if time.monotonic() < ends_s:
            out["moves"][context] = await move_costs(bench, context)
            print(f"context {context}: {show(out['moves'][context])}", flush=True)


async def measure_steps(bench: Bench, found: dict[int, Any], args: argparse.Namespace, ends_s: float) -> None:
    for batch in args.batches:
        if time.monotonic() < ends_s:
            await step_costs(bench, batch, args)  # graphs are captured and kernels compiled here
            found[batch] = await step_costs(bench, batch, args)
            print(f"batch {batch}: {show(found[batch])}", flush=True)


def show(numbers: dict[str, float]) -> str:
    return ", ".join(f"{name} {value:.4g}" for name, value in numbers.items())


def numbers_of(text: str) -> list[int]:
    return [int(word) for word in text.split(",")]


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, required=True, help="folder for the shape and moonlight_shape.json")
    parser.add_argument("--tiny", action="store_true", help="a small shape on a CPU")
    parser.add_argument("--draft-tokens", type=int, default=0, help="draft tokens per request and step (0: no drafts)")
    parser.add_argument("--batches", type=numbers_of, default=[1, 8, 16, 64, 128, 256])
    parser.add_argument("--contexts", type=numbers_of, default=[1024, 2048, 4096, 7680])
    parser.add_argument("--prompt-tokens", type=int, default=512)
    parser.add_argument("--new-tokens", type=int, default=192)
    parser.add_argument("--block-size", type=int, default=64, help="tokens of a KV block; a CPU takes 16 alone")
    parser.add_argument("--kv-bytes", type=int, default=24 << 30)
    parser.add_argument("--pool-bytes", type=int, default=16 << 30)
    parser.add_argument("--go", type=Path, help="measure when this file is there, then remove it")
    parser.add_argument("--limit-s", type=float, default=500.0, help="start nothing new after this time")
    args = parser.parse_args()
    args.max_model_len = 8192 - 16
    if args.tiny:
        args.batches, args.contexts, args.max_model_len = [1, 4], [96, 384], 440
        args.prompt_tokens, args.new_tokens, args.block_size = 32, 24, 16
        args.kv_bytes, args.pool_bytes = 64 << 20, 64 << 20
    return args


def main() -> None:
    args = parse()
    args.out.mkdir(parents=True, exist_ok=True)
    folder = args.out / "shape"
    folder.mkdir(exist_ok=True)
    (folder / "config.json").write_text(json.dumps(TINY if args.tiny else MOONLIGHT, indent=1))
    out: dict[str, Any] = {"stamp": print_stamp(args), "kv": kv_bytes(folder, args), "moves": {}, "steps": {}}
    out["steps_with_drafts"] = {}
    print(f"KV: {show(out['kv'])}", flush=True)
    try:
        asyncio.run(measure(folder, out, args))
    finally:
        (args.out / "moonlight_shape.json").write_text(json.dumps(out, indent=1))


if __name__ == "__main__":
    main()
