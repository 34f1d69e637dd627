# SPDX-License-Identifier: Apache-2.0
"""GRPO on one GPU: Seer's rollouts against TRL's own, same seeds, same batches, reward and time per step.

    python benchmarks/grpo/gpu.py --model FOLDER --out DIR [--arms seer,seer-vllm,vllm] [--steps 20] [--limit-s 540]
    python benchmarks/grpo/gpu.py --tiny --out DIR --steps 2 --arms seer,transformers       a check without a GPU

Arms, each in a process of its own, one after the other:
    seer           rollout_func=seer_rollouts(): the local engine in a child process on the same GPU
    seer-vllm      rollout_func=seer_rollouts(engine="vllm"): stock vLLM in child processes on the same GPU, drafts on
                   the GPU, weights handed over in place
    vllm           TRL with use_vllm=True, vllm_mode="colocate"
    transformers   TRL with transformers' generate

Trainer, task, seeds, learning rate and batch are the same for all arms. Sampled tokens are not: each engine has its own
random numbers. DIR/ARM.jsonl gets one line per step, DIR/ARM.log the arm's output, DIR/summary.json the stamp and the
means over the steps after the first two. `--limit-s` is for all arms together; an arm whose share is used up stops
after its current step. pack.py (beside this file) packs the wheels for a machine without a package index.

Times: `rollout_s` is the whole call that makes completions, with the transfer of new weights to the engine. `step_s` is
the time from the end of one optimizer step to the next.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

os.environ.setdefault("TRL_EXPERIMENTAL_SILENCE", "1")
os.environ.setdefault("HF_HUB_OFFLINE", "1")
HERE = Path(__file__).resolve().parent
sys.path[:0] = [str(HERE.parents[1] / "src"), str(HERE.parent)]

from stamp import as_text, take_stamp

ARMS = ("seer", "seer-vllm", "vllm", "transformers")
WARM_UP_STEPS = 2
"""Not in the means: these steps compile kernels and allocate the optimizer's state."""
START_S = 150.0
"""Time for an arm to reach its first step. With less time left, no arm is started."""


def main() -> None:
    args = read_arguments()
    args.out.mkdir(parents=True, exist_ok=True)
    if args.arm:
        run_arm(args)
    else:
        run_all(args)


# The process that runs the arms


def run_all(args: argparse.Namespace) -> None:
    began_s = time.monotonic()
    stamp = take_stamp(args)
    sys.stdout.write(f"{as_text(stamp)}\n\n")
    arms = args.arms.split(",")
    statuses: dict[str, Any] = {}
    for number, arm in enumerate(arms):
        left_s = args.limit_s - (time.monotonic() - began_s)
        share_s = left_s / (len(arms) - number)
        if share_s < min(START_S, args.limit_s / 4):
            statuses[arm] = "no time left"
            continue
        statuses[arm] = start_arm(args, arm, share_s)
        write_summary(args, statuses, stamp)
    sys.stdout.write((args.out / "summary.json").read_text())


def start_arm(args: argparse.Namespace, arm: str, limit_s: float) -> Any:
    """Exit status of the arm's process, or what failed. Without handles to GPU memory, it runs again without them."""
    for weights in dict.fromkeys((args.weights, "memory")) if arm.startswith("seer") else ("memory",):
        began_s = time.monotonic()
        command = [sys.executable, "-u", str(HERE / "gpu.py"), *sys.argv[1:], "--arm", arm, "--weights", weights]
        with (args.out / f"{arm}.log").open("a") as log:
            log.write(f"$ {' '.join(command)}\n")
            log.flush()
            try:
                status: Any = subprocess.run(
                    [*command, "--limit-s", f"{limit_s:.0f}"],
                    stdout=log,
                    stderr=subprocess.STDOUT,
                    timeout=limit_s + 60,
                    check=False,
                ).returncode
            except subprocess.TimeoutExpired:
                status = "killed at its limit"
        limit_s -= time.monotonic() - began_s
        if len(read_lines(args.out / f"{arm}.jsonl")) > 1 or limit_s < START_S:
            break
    return {"status": status, "weights": weights} if arm.startswith("seer") else status


def write_summary(args: argparse.Namespace, statuses: dict[str, Any], stamp: dict[str, Any]) -> None:
    summary: dict[str, Any] = {"stamp": stamp}
    for arm, status in statuses.items():
        lines = read_lines(args.out / f"{arm}.jsonl")
        warm = lines[WARM_UP_STEPS:]
        summary[arm] = {"status": status, "steps": len(lines)}
        for name in ("rollout_s", "step_s", "weights_s", "mean_tokens", "num_tokens", "mean_gap", "largest_gap"):
            values = [line[name] for line in warm if line.get(name) is not None]
            if len(values) > 1:
                middle, spread = statistics.mean(values), statistics.stdev(values)
                summary[arm][name] = {"mean": round(middle, 5), "stdev": round(spread, 5)}
        rewards = [round(line["reward"], 4) for line in lines]
        if rewards:
            summary[arm] |= {
                "reward_first_5": statistics.mean(rewards[:5]),
                "reward_last_5": statistics.mean(rewards[-5:]),
            }
            summary[arm]["rewards"] = rewards
    (args.out / "summary.json").write_text(json.dumps(summary, indent=1) + "\n")


def read_lines(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text().splitlines()] if path.is_file() else []


# One arm


def run_arm(args: argparse.Namespace) -> None:
    import torch
    from datasets import Dataset
    from datasets.table import InMemoryTable
    from transformers import AutoModelForCausalLM, AutoTokenizer
    from trl import GRPOConfig, GRPOTrainer
    from word_problems import problems, score

    began_s = time.monotonic()
    if args.tiny:
        sys.path.insert(0, str(HERE.parents[1] / "examples" / "grpo_trl"))
        from tiny_model import tiny_model, tiny_tokenizer

        model, tokenizer = tiny_model(0), tiny_tokenizer()
        rows = [{"prompt": f"{i}+{i}=", "answer": 2 * i} for i in range(64)]
    else:
        # Float32 weights under bfloat16 autocast: at this learning rate, bfloat16 weights would lose most of each
        # update to rounding.
        model = AutoModelForCausalLM.from_pretrained(args.model, dtype=torch.float32)
        tokenizer = AutoTokenizer.from_pretrained(args.model)
        rows = problems(args.prompts_per_step * (args.steps + 1), args.seed)

    def correct(completions: list[Any], answer: list[int], **rest: Any) -> list[float]:
        texts = [one if isinstance(one, str) else one[0]["content"] for one in completions]
        return [score(text, wanted) for text, wanted in zip(texts, answer, strict=True)]

    settings: dict[str, Any] = {}
    if args.arm == "vllm":
        settings = {"use_vllm": True, "vllm_mode": "colocate", "vllm_gpu_memory_utilization": args.vllm_memory}
        settings["vllm_max_model_length"] = args.max_tokens + 512
    batch = args.prompts_per_step * args.group_size
    config = GRPOConfig(
        output_dir=str(args.out / f"{args.arm}-trainer"),
        per_device_train_batch_size=min(batch, args.micro_batch),
        gradient_accumulation_steps=max(1, batch // args.micro_batch),
        num_generations=args.group_size,
        max_completion_length=args.max_tokens,
        max_steps=args.steps,
        learning_rate=args.learning_rate,
        lr_scheduler_type="constant",
        beta=0.0,
        seed=args.seed,
        shuffle_dataset=False,
        logging_steps=1,
        save_strategy="no",
        report_to=[],
        bf16=not args.tiny,
        use_cpu=args.tiny,
        disable_tqdm=True,
        gradient_checkpointing=args.gradient_checkpointing,
        **settings,
    )
    trainer = GRPOTrainer(
        model=model,
        processing_class=tokenizer,
        reward_funcs=correct,
        # A fixed fingerprint: datasets would pickle all of pyarrow to make one, which fails with some versions.
        train_dataset=Dataset(InMemoryTable.from_pylist(rows), fingerprint=f"rows-{args.seed}-{len(rows)}"),
        args=config,
        rollout_func=seers(args) if args.arm.startswith("seer") else None,
    )
    log_steps(trainer, args, began_s)
    trainer.train()


def seers(args: argparse.Namespace) -> Any:
    from seer import HostingConfig
    from seer.integrations.trl import seer_rollouts

    if args.tiny:
        return seer_rollouts(kv_blocks=512, max_num_seqs=16)
    hosting = HostingConfig(
        pin_cores=False,
        silence_deadline_s=60,
        progress_deadline_s=300,
        log_dir=args.out / "seer-logs",
        weights_in_place=args.weights == "in-place",
    )
    return seer_rollouts(
        engine="vllm" if args.arm == "seer-vllm" else "local",
        instances=args.instances,
        max_num_seqs=args.max_num_seqs,
        kv_memory_bytes=int(args.kv_memory_gib * 2**30) // args.instances,
        max_model_len=args.max_tokens + 512,
        speculation=args.speculation,
        check_responses=16,
        hosting=hosting,
    )


def log_steps(trainer: Any, args: argparse.Namespace, began_s: float) -> None:
    """Time every call that makes completions, write one line per step, and stop before the limit."""
    from transformers import TrainerCallback

    rollouts_s: list[float] = []
    generate = trainer._generate

    def timed(prompts: list[Any]) -> Any:
        started_s = time.monotonic()
        made = generate(prompts)
        rollouts_s.append(time.monotonic() - started_s)
        return made

    trainer._generate = timed
    path = args.out / f"{args.arm}.jsonl"
    path.write_text("")
    (args.out / f"{args.arm}-stamp.json").write_text(json.dumps(take_stamp(args), indent=1) + "\n")

    class Writer(TrainerCallback):
        last_s = time.monotonic()

        def on_log(self, _: Any, state: Any, control: Any, logs: dict[str, Any] | None = None, **rest: Any) -> None:
            if logs is None or "reward" not in logs:
                return
            now_s = time.monotonic()
            line = {
                "step": state.global_step,
                "reward": logs["reward"],
                "mean_tokens": logs["completions/mean_length"],
                "longest_tokens": logs["completions/max_length"],
                "clipped": logs["completions/clipped_ratio"],
                "num_tokens": logs["completions/mean_length"] * args.prompts_per_step * args.group_size,
                "rollout_s": sum(rollouts_s),
                "step_s": now_s - self.last_s,
                "at_s": now_s - began_s,
                "loss": logs.get("loss"),
                "seer_rollout_s": logs.get("seer/rollout_s"),  # without the on-policy check
                "weights_s": logs.get("seer/weights_s"),
                "tail_s": logs.get("seer/tail_s"),
                "mean_ratio": logs.get("seer/on_policy/mean_ratio"),
                "mean_gap": logs.get("seer/on_policy/mean_gap"),
                "largest_gap": logs.get("seer/on_policy/largest_gap"),
            }
            rollouts_s.clear()
            Writer.last_s = now_s
            with path.open("a") as file:
                file.write(json.dumps(line) + "\n")
            if now_s - began_s + 2 * line["step_s"] > args.limit_s:
                control.should_training_stop = True

    trainer.add_callback(Writer())


def read_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", type=Path, help="a Hugging Face folder")
    parser.add_argument("--tiny", action="store_true", help="a tiny model on the CPU, to check this script")
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--arms", default="seer,vllm,transformers")
    parser.add_argument("--arm", choices=ARMS, help=argparse.SUPPRESS)
    parser.add_argument("--steps", type=int, default=24)
    parser.add_argument("--limit-s", type=float, default=540.0)
    parser.add_argument("--group-size", type=int, default=16)
    parser.add_argument("--prompts-per-step", type=int, default=16)
    parser.add_argument("--micro-batch", type=int, default=32, help="responses per forward and backward pass")
    parser.add_argument("--max-tokens", type=int, default=512)
    parser.add_argument("--learning-rate", type=float, default=2e-6)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--gradient-checkpointing", action="store_true")
    parser.add_argument("--instances", type=int, default=1)
    parser.add_argument("--max-num-seqs", type=int, default=256)
    parser.add_argument("--kv-memory-gib", type=float, default=20.0, help="of all of Seer's instances together")
    parser.add_argument("--vllm-memory", type=float, default=0.25, help="share of the GPU that TRL's vLLM takes")
    parser.add_argument("--speculation", choices=("auto", "off"), default="auto")
    parser.add_argument("--weights", choices=("in-place", "memory"), default="in-place", help="how they reach Seer")
    args = parser.parse_args()
    if args.tiny:
        args.group_size, args.prompts_per_step, args.max_tokens, args.micro_batch = 4, 4, 16, 16
        args.learning_rate = 1e-3
    elif args.model is None:
        parser.error("--model FOLDER, or --tiny")
    return args


if __name__ == "__main__":
    main()
