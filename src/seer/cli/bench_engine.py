# SPDX-License-Identifier: Apache-2.0
"""`seer bench engine`: tokens per second of the local engine, beside transformers and vLLM where they are
installed.
"""

from __future__ import annotations

import argparse
import importlib
import json
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from seer.cli.number_option import NumberOption, number_list
from seer.cli.output_file import refuse_output, write_output
from seer.errors import ConfigError, MissingExtra
from seer.ranges import Count, Repeats, SequenceSlots, Temperature, Threads

if TYPE_CHECKING:
    from seer.engine.local.bench import Throughput

PEERS = ("transformers", "vllm")

EXAMPLES = """\
examples:
  seer bench engine                                   SmolLM2 on one CPU thread, beside transformers
  seer bench engine DIR --device cuda --batches 64,256 --peers vllm
"""


def register(subparsers: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Add `seer bench engine`."""
    parser = subparsers.add_parser(
        "engine",
        help="measure generation speed of the local engine beside its peers",
        description="Generate a fixed number of tokens for batches of random prompts, engine after engine.\n"
        "Times are wall and CPU seconds of the whole call, prompts included.",
        epilog=EXAMPLES,
    )
    parser.add_argument(
        "model", metavar="MODEL", nargs="?", default="smollm2", help="folder, Hugging Face id or name (%(default)s)"
    )
    parser.add_argument("--batches", metavar="N,...", default="1,8,32", help="requests at once (%(default)s)")
    parser.add_argument(
        "--prompt-tokens", metavar="N", type=NumberOption(Count), default=64, help="tokens of each prompt (%(default)s)"
    )
    parser.add_argument(
        "--new-tokens",
        metavar="N",
        type=NumberOption(Count),
        default=256,
        help="tokens to generate per request (%(default)s)",
    )
    parser.add_argument(
        "--temperature",
        metavar="X",
        type=NumberOption(Temperature),
        default=1.0,
        help="sampling temperature (%(default)s)",
    )
    parser.add_argument(
        "--peers", metavar="NAME", default="transformers", help="transformers, vllm, both or none (%(default)s)"
    )
    parser.add_argument(
        "--repeat",
        metavar="N",
        type=NumberOption(Repeats),
        default=3,
        help="runs of each engine, in turn (%(default)s)",
    )
    parser.add_argument(
        "--threads", metavar="N", type=NumberOption(Threads), default=1, help="CPU threads (%(default)s)"
    )
    parser.add_argument("--device", metavar="NAME", default="cpu", help="cpu or cuda (%(default)s)")
    parser.add_argument("--json", metavar="FILE.json", type=Path, help="also write every run to this file")
    parser.add_argument("--force", action="store_true", help="replace a file that is at --json")
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    """Run every engine in turn and print the medians."""
    batches = sorted({*number_list(args.batches, SequenceSlots, "--batches")})
    if args.json:
        refuse_output(args.json, option="--json", force=args.force)
    try:
        import torch

        from seer.engine.local.bench import random_prompts
        from seer.engine.local.models_get import find_model
    except ModuleNotFoundError as error:
        raise MissingExtra(error.name or "torch", "local") from None
    torch.set_num_threads(args.threads)
    folder = find_model(args.model)
    engines: dict[str, Generator] = {"seer": _local(folder, args, max(batches))}
    for peer in [] if args.peers == "none" else args.peers.split(","):
        if peer not in PEERS:
            raise ConfigError(f"--peers {peer} is not known", hint=f"of {', '.join(PEERS)}, or none")
        engines[peer] = (_transformers if peer == "transformers" else _vllm)(folder, args)
    runs: list[dict[str, Any]] = []
    for batch in batches:
        for repeat in range(args.repeat):
            prompts = random_prompts(batch, args.prompt_tokens, 10_000, seed=repeat)
            for name, generate in engines.items():
                done = generate(prompts)
                runs.append({"engine": name, "batch": batch, "wall_s": done.wall_s, "cpu_s": done.cpu_s,
                             "tokens": done.num_tokens, "step_s": done.step_s})  # fmt: skip
        _print_batch(batch, [entry for entry in runs if entry["batch"] == batch])
    if args.json:
        content = {"args": {k: str(v) for k, v in vars(args).items()}, "runs": runs}
        write_output(args.json, json.dumps(content, indent=1).encode(), option="--json")
    return 0


Generator = Callable[[Sequence[Sequence[int]]], "Throughput"]


def _local(folder: Path, args: argparse.Namespace, most: int) -> Generator:
    import torch

    from seer.engine.local.assembly import EngineSettings, assemble, choose_dtype, choose_limits
    from seer.engine.local.bench import generate_batch
    from seer.engine.local.model_config import read_config

    config, device = read_config(folder), torch.device(args.device)
    step = 512 if device.type == "cpu" else 8192
    settings = EngineSettings(dtype=choose_dtype("auto", device), device=device, max_step_tokens=max(step, most))
    blocks = most * (-(-(args.prompt_tokens + args.new_tokens) // 16) + 1)
    limits = choose_limits(config, settings, block_size=16, max_num_seqs=most, kv_blocks=blocks)
    engine = assemble(0, folder, config, limits, settings)
    return lambda prompts: generate_batch(engine, prompts, args.new_tokens, temperature=args.temperature)


def _transformers(folder: Path, args: argparse.Namespace) -> Generator:
    import torch

    from seer.engine.local.bench import Throughput

    try:
        from transformers import AutoModelForCausalLM
    except ModuleNotFoundError:
        raise ConfigError("transformers is not installed", hint="pip install transformers, or --peers none") from None
    dtype = torch.float32 if args.device == "cpu" else torch.bfloat16
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=dtype, use_safetensors=True).to(args.device).eval()

    def generate(prompts: Sequence[Sequence[int]]) -> Throughput:
        ids = torch.tensor(prompts, device=args.device)
        wall, cpu = time.perf_counter(), time.process_time()
        with torch.inference_mode():
            made = model.generate(
                ids,
                attention_mask=torch.ones_like(ids),
                do_sample=args.temperature > 0,
                temperature=args.temperature or None,
                top_k=0,
                top_p=1.0,
                max_new_tokens=args.new_tokens,
                min_new_tokens=args.new_tokens,
                pad_token_id=0,
            )
        wall, cpu = time.perf_counter() - wall, time.process_time() - cpu
        return Throughput(len(prompts), made.numel() - ids.numel(), wall, cpu, wall / args.new_tokens)

    return generate


def _vllm(folder: Path, args: argparse.Namespace) -> Generator:
    from seer.engine.local.bench import Throughput

    try:
        vllm = importlib.import_module("vllm")
    except ModuleNotFoundError:
        raise ConfigError("vLLM is not installed", hint="pip install vllm, or leave it out of --peers") from None
    llm = vllm.LLM(model=str(folder), gpu_memory_utilization=0.4)
    params = vllm.SamplingParams(
        temperature=args.temperature,
        max_tokens=args.new_tokens,
        min_tokens=args.new_tokens,
        ignore_eos=True,
        logprobs=0,
    )

    def generate(prompts: Sequence[Sequence[int]]) -> Throughput:
        asked = [{"prompt_token_ids": list(prompt)} for prompt in prompts]
        wall, cpu = time.perf_counter(), time.process_time()
        made = llm.generate(asked, params, use_tqdm=False)
        wall, cpu = time.perf_counter() - wall, time.process_time() - cpu
        count = sum(len(output.outputs[0].token_ids) for output in made)
        return Throughput(len(prompts), count, wall, cpu, wall / args.new_tokens)

    return generate


def _print_batch(batch: int, runs: Sequence[dict[str, Any]]) -> None:
    """One line per engine: the median run, and how far the others were from it."""
    ours = _median_cpu(runs, "seer")
    for name in dict.fromkeys(run["engine"] for run in runs):
        mine = sorted(run["tokens"] / run["wall_s"] for run in runs if run["engine"] == name)
        cpu = _median_cpu(runs, name)
        sys.stdout.write(
            f"batch {batch:4d}  {name:<13}{mine[len(mine) // 2]:9.1f} tok/s"
            f"  (from {mine[0]:.1f} to {mine[-1]:.1f})"
            f"  {cpu:8.1f} tok per CPU s  {ours / cpu:5.2f}x\n"
        )
    sys.stdout.flush()


def _median_cpu(runs: Sequence[dict[str, Any]], name: str) -> float:
    rates = sorted(run["tokens"] / run["cpu_s"] for run in runs if run["engine"] == name)
    return float(rates[len(rates) // 2])
