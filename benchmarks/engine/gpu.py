# SPDX-License-Identifier: Apache-2.0
"""The embedded engine on a GPU: correctness, speed and speculation, in one run that ends within its limit.

    python benchmarks/engine/gpu.py --smollm2 FOLDER [--qwen FOLDER] --out DIR [--limit-s 480]
    python benchmarks/engine/gpu.py --only vllm ...     vLLM alone; the first command starts it in its own process

Sections: correctness, decode (SmolLM2 by batch size), vllm (the same), seven (a 7B shape with made-up weights),
speculation (grouped drafts), tree (tree against linear verification). DIR/engine-gpu.json is written after each
section. A section that fails leaves its traceback there, and the next one runs.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import time
import traceback
from collections.abc import Iterator, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import torch

ROOT = Path(__file__).resolve().parents[2]
sys.path[:0] = [str(ROOT / "src"), str(ROOT / "benchmarks")]

from seer.drafting.base import Allowance, DraftAsk, DraftTree, RunningBatch
from seer.drafting.grouped_drafter import GroupedDrafter
from seer.drafting.live_budget import MeasuredBudget
from seer.engine.local.assembly import EngineSettings, assemble, choose_limits
from seer.engine.local.bench import generate_batch, random_prompts
from seer.engine.local.engine import Engine
from seer.engine.local.hosted import GPU_TREES
from seer.engine.local.model_config import config_from_dict, read_config
from seer.engine.local.tiny import make_tiny_model
from seer.engine.local.tokenizer import Tokenizer
from seer.engine.local.weights import expected_shapes
from seer.speculation.step_report import StepReport
from seer.types import Chunk, Sampling
from stamp import print_stamp, take_stamp
from turns import await_turn

BUDGETED = -1
"""Instead of a fixed depth: the budget chooses it step by step from measured costs and acceptance."""
BATCHES = (1, 8, 32, 128, 256)
PROMPT_TOKENS, NEW_TOKENS = 128, 256
SEVEN = {
    "model_type": "qwen2", "vocab_size": 152064, "hidden_size": 3584, "intermediate_size": 18944,
    "num_hidden_layers": 28, "num_attention_heads": 28, "num_key_value_heads": 4, "max_position_embeddings": 4096,
    "rope_theta": 1e6, "rms_norm_eps": 1e-6, "tie_word_embeddings": False, "eos_token_id": 1,
    "architectures": ["Qwen2ForCausalLM"], "torch_dtype": "bfloat16", "hidden_act": "silu",
}  # fmt: skip
QUESTIONS = (
    "A farmer has 17 sheep and buys 3 pens of 8 sheep each. How many sheep are there now? Think step by step.",
    "Natalia sold 48 clips in April and half as many in May. How many clips did she sell in all?",
    "Write a Python function that returns the n-th Fibonacci number without recursion, and explain it.",
    "Write a Python function that checks whether a string is a palindrome, ignoring case and punctuation.",
    "A train travels 60 km in 45 minutes. What is its speed in km/h? Explain your steps.",
    "Write a Python function that merges two sorted lists into one sorted list.",
    "What is the sum of all even numbers from 2 to 100? Show the reasoning.",
    "Write a Python class for a stack with push, pop and peek, with docstrings.",
)


class RandomWeights(Mapping[str, torch.Tensor]):
    """Made-up weights on the device, one tensor at a time."""

    def __init__(self, config: Mapping[str, Any]) -> None:
        self.shapes = expected_shapes(config_from_dict(dict(config), source="made-up"))

    def __getitem__(self, name: str) -> torch.Tensor:
        generator = torch.Generator("cuda").manual_seed(len(name))
        value = torch.randn(self.shapes[name], generator=generator, device="cuda", dtype=torch.bfloat16)
        return value.abs() if name.endswith("norm.weight") else value * 0.02

    def __iter__(self) -> Iterator[str]:
        return iter(self.shapes)

    def __len__(self) -> int:
        return len(self.shapes)


class Blind:
    """Proposes arbitrary tokens in trees of a fixed form: the cost of verification does not depend on the tokens."""

    def __init__(self, parents: Sequence[int | None]) -> None:
        self.parents = list(parents)

    def observe(self, group: int, request: int, tokens: Sequence[int], *, start: int) -> None:
        pass

    def draft(self, asks: Sequence[DraftAsk]) -> list[DraftTree]:
        count = len(self.parents)
        return [DraftTree([7 + i for i in range(count)], self.parents) for _ in asks]

    def forget(self, request: int) -> None:
        pass


def an_engine(
    folder: Path, batch: int, context: int, *, weights: Any = None, config: Any = None, **settings: Any
) -> Engine:
    config = config or read_config(folder)
    chosen = EngineSettings(
        **({"dtype": torch.bfloat16, "device": torch.device("cuda"), "max_step_tokens": 8192} | settings)
    )
    blocks = batch * (-(-context // 16) + 2)
    limits = choose_limits(
        config, chosen, block_size=16, max_num_seqs=batch, kv_blocks=blocks, max_model_len=context + 32
    )
    return assemble(0, folder, config, limits, chosen, weights=weights)


def a_chunk(request: int, group: int, prompt: Sequence[int], num_tokens: int, **sampling: Any) -> Chunk:
    return Chunk(
        request=request, group=group, attempt=1, num_prompt_tokens=len(prompt), num_generated_tokens=0,
        max_tokens=num_tokens, sampling=Sampling(**({"max_tokens": num_tokens, "ignore_eos": True} | sampling)),
        seed=1000 + request, weights_version=0, prompt=list(prompt),
    )  # fmt: skip


def play(engine: Engine, chunks: Sequence[Chunk]) -> tuple[dict[int, tuple[list[int], list[float]]], float]:
    """Tokens and raw log-probabilities of every request, and the wall time."""
    generated: dict[int, tuple[list[int], list[float]]] = {chunk.request: ([], []) for chunk in chunks}
    torch.cuda.synchronize()
    started = time.perf_counter()
    with torch.inference_mode():
        for chunk in chunks:
            engine.add(chunk)
        while engine.busy:
            for output in engine.step():
                if output.span is not None:
                    generated[output.request][0].extend(output.span.ids)
                    generated[output.request][1].extend(output.span.raw_logprobs or ())
    return generated, time.perf_counter() - started


def difference(a: Mapping[int, Any], b: Mapping[int, Any]) -> dict[str, float]:
    """First divergences per token compared, and the log-probability gap where tokens are equal."""
    compared = diverged = 0
    gaps: list[float] = []
    for request in a:
        for (x, p), (y, q) in zip(zip(*a[request], strict=True), zip(*b[request], strict=True), strict=False):
            compared += 1
            if x != y:
                diverged += 1
                break
            gaps.append(abs(p - q))
    gaps.sort()
    return {
        "tokens_compared": compared, "requests": len(a), "diverged": diverged,
        "divergence_per_token": diverged / max(1, compared),
        "logprob_gap_mean": statistics.fmean(gaps) if gaps else 0.0,
        "logprob_gap_p99": gaps[int(len(gaps) * 0.99)] if gaps else 0.0,
    }  # fmt: skip


# Sections


def correctness(args: argparse.Namespace) -> dict[str, Any]:
    found: dict[str, Any] = {}
    tiny = make_tiny_model(args.out / "tiny", "qwen3", seed=3)
    chunks = [a_chunk(i, 0, list(range(3, 20 + i)), 40, temperature=float(i % 2)) for i in range(8)]
    exact, _ = play(an_engine(tiny, 8, 128, dtype=torch.float32, device=torch.device("cpu"), kernels="torch"), chunks)
    for name, extra in {
        "decode": {},
        "trees": {"drafter": Blind([None, 0, 0, None, 3, 1]), "budget": lambda batch: Allowance(6)},
    }.items():
        made, _ = play(an_engine(tiny, 8, 128, dtype=torch.float32, **extra), chunks)
        found[f"tiny fp32 {name} against PyTorch on a CPU"] = difference(made, exact)
    prompts = random_prompts(32, 64, 10_000)
    for temperature in (0.0, 1.0):
        chunks = [a_chunk(i, i % 4, p, 192, temperature=temperature) for i, p in enumerate(prompts)]
        engine = an_engine(args.smollm2, 1, 300)
        alone: dict[int, Any] = {}
        for chunk in chunks:
            alone |= play(engine, [chunk])[0]
        together, _ = play(an_engine(args.smollm2, 32, 300), chunks)
        drafter = GroupedDrafter((), None)
        drafter.begin_run("bench", "grouped", 0)
        drafted, _ = play(
            an_engine(args.smollm2, 32, 300, drafter=drafter, budget=lambda batch: Allowance(6, 2)), chunks
        )
        spec, _ = play(an_engine(args.smollm2, 8, 300, kernels="torch"), chunks[:8])
        key = f"SmolLM2 bf16 T={temperature:g}"
        found[f"{key} batch 32 against batch 1"] = difference(together, alone)
        found[f"{key} drafts against batch 1"] = difference(drafted, alone)
        found[f"{key} Triton against PyTorch"] = difference({r: alone[r] for r in spec}, spec)
    return found


def decode(args: argparse.Namespace) -> dict[str, Any]:
    found: dict[str, Any] = {}
    for batch in BATCHES:
        engine = an_engine(args.smollm2, batch, PROMPT_TOKENS + NEW_TOKENS)
        generate_batch(engine, random_prompts(batch, PROMPT_TOKENS, 10_000, seed=9), 32, temperature=1.0)
        runs = []
        for repeat in range(3):
            done = generate_batch(
                engine, random_prompts(batch, PROMPT_TOKENS, 10_000, seed=repeat), NEW_TOKENS, temperature=1.0
            )
            runs.append({"tokens_per_s": done.tokens_per_s, "step_ms": done.step_s * 1e3})
        found[str(batch)] = runs
        del engine
        torch.cuda.empty_cache()
    return found


def seven(args: argparse.Namespace) -> dict[str, Any]:
    folder = args.out / "seven"
    folder.mkdir(exist_ok=True)
    (folder / "config.json").write_text(json.dumps(SEVEN))
    config = read_config(folder)
    found: dict[str, Any] = {}
    engine = None
    for batch in (1, 8, 32, 128, 256):
        del engine
        engine = an_engine(folder, batch, PROMPT_TOKENS + 128, weights=RandomWeights(SEVEN), config=config)
        generate_batch(engine, random_prompts(batch, PROMPT_TOKENS, 10_000, seed=9), 16, temperature=1.0)
        runs = []
        for repeat in range(2):
            done = generate_batch(
                engine, random_prompts(batch, PROMPT_TOKENS, 10_000, seed=repeat), 128, temperature=1.0
            )
            runs.append({"tokens_per_s": done.tokens_per_s, "step_ms": done.step_s * 1e3})
        found[str(batch)] = runs
    return found


def speculation(args: argparse.Namespace) -> dict[str, Any]:
    folder = args.qwen or args.smollm2
    tokenizer = Tokenizer(folder)
    prompts = [tokenizer.chat([{"role": "user", "content": question}]) for question in QUESTIONS]
    (args.out / "questions.json").write_text(json.dumps(prompts))  # for vLLM as a Seer instance, in ../vllm/gpu.py
    context = max(map(len, prompts)) + 320
    sampling = {"ignore_eos": False, "temperature": 1.0}
    found: dict[str, Any] = {"model": folder.name}
    siblings = [a_chunk(100 + 15 * g + i, g, prompts[g], 300, **sampling) for g in range(8) for i in range(15)]
    generated, wall = play(an_engine(folder, 120, context), siblings)
    found["wide, no drafts, tokens/s"] = sum(len(ids) for ids, _ in generated.values()) / wall

    def teach(drafter: GroupedDrafter) -> GroupedDrafter:
        """Index the 15 finished siblings of each prompt, and nothing else."""
        drafter.begin_run("bench", "grouped", 0)
        for chunk in siblings:
            drafter.observe(chunk.group, chunk.request, generated[chunk.request][0], start=0)
        return drafter

    for batch, count in ((1, 4), (8, 16), (64, 64)):
        row: dict[str, Any] = {}
        for depth, paths in ((0, 1), (4, 1), (8, 2), (BUDGETED, 1)):
            steps: list[StepReport] = []
            drafter = teach(GroupedDrafter((), None)) if depth else None
            if depth == BUDGETED:
                assert drafter is not None, "a budget prices drafts"
                measured = MeasuredBudget(drafter, GPU_TREES)
                watch = partial(_tell, (steps.append, measured.on_step))
                engine = an_engine(folder, batch, context, drafter=drafter, budget=measured, on_step=watch)
            else:
                fixed = partial(_allow, Allowance(depth, paths))
                engine = an_engine(folder, batch, context, drafter=drafter, budget=fixed, on_step=steps.append)
            play(engine, [a_chunk(5000 + i, 99, prompts[i % 8], 24, **sampling) for i in range(batch)])
            runs = []
            for repeat in range(3):
                # Responses of an earlier run must not help a later one: other seeds, and a new index.
                if drafter is not None:
                    teach(drafter)
                first = 1000 * (1 + repeat)
                asked = [a_chunk(first + i, i % 8, prompts[i % 8], 300, **sampling) for i in range(count)]
                steps.clear()
                made, wall = play(engine, asked)
                total = sum(len(ids) for ids, _ in made.values())
                decoding = [step.duration_s for step in steps if not step.num_prefill_tokens]
                runs.append(
                    {
                        "tokens_per_s": total / wall,
                        "tokens": total,
                        "step_ms": statistics.median(decoding) * 1e3,
                        "drafted": sum(step.num_drafted for step in steps),
                        "accepted": sum(step.num_accepted for step in steps),
                        "longest step, ms": max(step.duration_s for step in steps) * 1e3,
                    }
                )
            named = {0: "off", BUDGETED: "measured budget"}
            row[named.get(depth, f"{depth} tokens, {paths} paths")] = runs
        best_off = max(run["tokens_per_s"] for run in row["off"])
        row["budget's gain"] = max(run["tokens_per_s"] for run in row["measured budget"]) / best_off
        row["best gain"] = max(
            run["tokens_per_s"] for key, runs in row.items() if "paths" in key for run in runs
        ) / best_off  # fmt: skip
        found[f"batch {batch}"] = row
    return found


def _allow(allowance: Allowance, batch: RunningBatch) -> Allowance:
    return allowance


def _tell(sinks: Sequence[Any], report: StepReport) -> None:
    for sink in sinks:
        sink(report)


def tree(args: argparse.Namespace) -> dict[str, Any]:
    """Step time of tree and of linear verification at equal numbers of nodes."""
    folder = args.qwen or args.smollm2
    forms: dict[str, list[int | None]] = {
        "linear": [None, *range(7)],
        "two paths": [None, 0, 1, 2, None, 4, 5, 6],
        "bush": [None, None, 0, 0, 1, 1, 2, 3],
    }
    found: dict[str, Any] = {}
    for batch in (1, 8, 64):
        for name, parents in forms.items():
            steps: list[StepReport] = []
            engine = an_engine(
                folder, batch, 640, drafter=Blind(parents), budget=lambda batch: Allowance(8, 2), on_step=steps.append
            )
            play(engine, [a_chunk(i, i, p, 60) for i, p in enumerate(random_prompts(batch, 512, 10_000))])
            times = sorted(step.duration_s * 1e3 for step in steps if not step.num_prefill_tokens)[2:-2]
            found[f"batch {batch} {name}"] = {
                "step_ms": statistics.median(times),
                "iqr_ms": times[len(times) * 3 // 4] - times[len(times) // 4],
            }
    return found


def vllm(args: argparse.Namespace) -> dict[str, Any]:
    """vLLM, in this process; `main` starts a process for it."""
    from vllm import LLM, SamplingParams

    found: dict[str, Any] = {}
    stamp = take_stamp(args)

    def measure(name: str, llm: Any, prompts: Any, params: Any, *, batch: int, repeats: int) -> None:
        runs = []
        for repeat in range(repeats + 1):
            asked = [{"prompt_token_ids": p} for p in prompts(repeat)]
            total = wall = 0.0
            for first in range(0, len(asked), batch):
                started = time.perf_counter()
                made = llm.generate(asked[first : first + batch], params, use_tqdm=False)
                wall += time.perf_counter() - started
                total += sum(len(m.outputs[0].token_ids) for m in made)
            runs.append({"tokens_per_s": total / wall, "tokens": total})
        found[f"{name} batch {batch}"] = runs[1:]
        (args.out / "engine-gpu-vllm.json").write_text(json.dumps({"stamp": stamp, "vllm": found}, indent=1))

    def decode_batches(name: str, llm: Any, params: Any, *, repeats: int) -> None:
        for batch in BATCHES:
            prompts = partial(random_prompts, batch, PROMPT_TOKENS, 10_000)
            measure(name, llm, lambda r, make=prompts: make(seed=r), params, batch=batch, repeats=repeats)

    sizes = {"max_model_len": 2048, "enable_prefix_caching": True}
    if args.seven:
        llm = LLM(
            model=str(args.seven),
            load_format="dummy",
            skip_tokenizer_init=True,
            gpu_memory_utilization=0.2,
            kv_cache_memory_bytes=8 << 30,  # gpu_memory_utilization would count other processes
            **sizes,
        )
        params = SamplingParams(temperature=1.0, max_tokens=128, ignore_eos=True, logprobs=0, detokenize=False)
        (args.out / "seven.ready").touch()
        await_turn(args.go, args.limit_s)
        decode_batches("seven", llm, params, repeats=2)
        del llm
    if args.qwen:
        # The same questions as in `speculation`, answered to their end, with the same number of requests at once.
        llm = LLM(model=str(args.qwen), gpu_memory_utilization=0.3, **sizes)
        params = SamplingParams(temperature=1.0, max_tokens=300, logprobs=0)
        questions = [Tokenizer(args.qwen).chat([{"role": "user", "content": question}]) for question in QUESTIONS]
        for batch, count in ((1, 4), (8, 16), (64, 64)):
            measure(
                "qwen", llm, lambda r, n=count: [questions[i % 8] for i in range(n)], params, batch=batch, repeats=2
            )
        del llm
    if not args.skip_smollm2_peer:
        llm = LLM(model=str(args.smollm2), gpu_memory_utilization=0.3, **sizes)
        params = SamplingParams(temperature=1.0, max_tokens=NEW_TOKENS, ignore_eos=True, logprobs=0)
        decode_batches("smollm2", llm, params, repeats=3)
    return found


SECTIONS = {"correctness": correctness, "decode": decode, "speculation": speculation, "tree": tree, "seven": seven}


def main() -> int:
    options = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    options.add_argument("--smollm2", type=Path, required=True)
    options.add_argument("--qwen", type=Path)
    options.add_argument("--out", type=Path, required=True)
    options.add_argument("--seven", type=Path, help="folder with the 7B shape, for vLLM (section seven writes it)")
    options.add_argument("--go", type=Path, help="of vLLM: start measuring when this file exists")
    options.add_argument("--skip-smollm2-peer", action="store_true")
    options.add_argument("--limit-s", type=float, default=480)
    options.add_argument("--only", default=",".join((*SECTIONS, "vllm")), help="sections, in order")
    args = options.parse_args()
    args.out.mkdir(parents=True, exist_ok=True)
    started = time.monotonic()
    results: dict[str, Any] = {
        "stamp": print_stamp(args),
        "prompt_tokens": PROMPT_TOKENS,
        "new_tokens": NEW_TOKENS,
    }
    alone = args.only == "vllm"
    path = args.out / ("engine-gpu-vllm.json" if alone else "engine-gpu.json")
    for name in args.only.split(","):
        left = args.limit_s - (time.monotonic() - started)
        if left < 20:
            results[name] = {"skipped": f"{left:.0f} s left"}
        elif name == "vllm" and not alone:
            command = [
                sys.executable,
                __file__,
                "--only",
                "vllm",
                "--smollm2",
                str(args.smollm2),
                "--out",
                str(args.out),
            ]
            command += ["--qwen", str(args.qwen)] if args.qwen else []
            command += ["--skip-smollm2-peer"] if args.skip_smollm2_peer else []
            command += ["--seven", str(args.out / "seven")] if (args.out / "seven").exists() else []
            try:
                subprocess.run(command, timeout=left, check=False, env=os.environ | {"VLLM_LOGGING_LEVEL": "ERROR"})
            except subprocess.TimeoutExpired:
                results[name] = {"stopped": f"after {left:.0f} s; its numbers so far are in engine-gpu-vllm.json"}
        else:
            began = time.monotonic()
            try:
                results[name] = (SECTIONS | {"vllm": vllm})[name](args)
            except Exception:  # one section must not cost the others their time on the GPU
                results[name] = {"failed": traceback.format_exc()}
            results[name]["took_s"] = round(time.monotonic() - began, 1)
        path.write_text(json.dumps(results, indent=1, default=str))
        print(name, json.dumps(results.get(name), indent=1, default=str), flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
