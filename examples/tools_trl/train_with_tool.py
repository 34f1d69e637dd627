# SPDX-License-Identifier: Apache-2.0
"""GRPO with TRL on a task with a tool: the model may run Python before it answers; rollouts by Seer.

    python examples/tools_trl/train_with_tool.py --tiny                 # a minute; a tiny model with random weights
    seer model get smollm2
    python examples/tools_trl/train_with_tool.py --steps 20             # SmolLM2-135M on two CPU instances
    seer report out/tools/seer                                # turns, waits for the tool, reward, the timeline

The lines that Seer adds to a plain TRL script are marked `Seer`. Tokens that the tool gave are not trained on. Each
step prints its reward, turns per response, tool failures, and seconds that responses waited for the tool.
"""

from __future__ import annotations

import argparse
import os
from pathlib import Path
from typing import Any

os.environ.setdefault("TRL_EXPERIMENTAL_SILENCE", "1")

import torch
from calculator import SumTool, chat_tool, sums, word_problems
from datasets import Dataset
from tiny_chat_model import tiny_model, tiny_tokenizer
from transformers import AutoModelForCausalLM, AutoTokenizer, PrinterCallback, TrainerCallback
from trl import GRPOConfig, GRPOTrainer

from seer.engine.local.models_get import find_model
from seer.integrations.trl import environment_reward, seer_rollouts  # Seer


def main() -> list[dict[str, Any]]:
    """Train; returns what each step printed."""
    args = read_arguments()
    model: Any
    tokenizer: Any
    environment: Any
    if args.tiny:
        model, tokenizer, environment = tiny_model(args.seed), tiny_tokenizer(), SumTool()
        rows = sums(args.num_prompts, args.seed)
    else:
        folder = find_model(args.model)
        model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
        tokenizer, environment = AutoTokenizer.from_pretrained(folder), chat_tool()
        rows = word_problems(args.num_prompts, args.seed)
    printer = Printer()
    with seer_rollouts(  # Seer
        environment=environment,
        instances=args.instances,
        max_num_seqs=args.max_num_seqs,
        kv_memory_bytes=args.kv_memory_mib << 20,
    ) as rollouts:
        trainer = GRPOTrainer(
            model=model,
            processing_class=tokenizer,
            reward_funcs=environment_reward,  # Seer: the environment's own
            train_dataset=Dataset.from_list(rows),
            args=configuration(args),
            rollout_func=rollouts,  # Seer
            callbacks=[printer],
        )
        trainer.remove_callback(PrinterCallback)  # the trainer's own, which prints every number of a step
        trainer.train()
    print(f"\nseer report {args.output_dir / 'seer'}")
    return printer.steps


def configuration(args: argparse.Namespace) -> GRPOConfig:
    """TRL's own settings; Seer takes lengths, sampling, group size and seeds from here."""
    return GRPOConfig(
        output_dir=str(args.output_dir),
        per_device_train_batch_size=args.prompts_per_step * args.group_size,
        num_generations=args.group_size,
        max_completion_length=args.max_tokens,
        max_steps=args.steps,
        learning_rate=args.learning_rate,
        seed=args.seed,
        logging_steps=1,
        save_strategy="no",
        report_to=[],
        bf16=False,
        disable_tqdm=True,
        gradient_checkpointing=False,
        dataloader_pin_memory=torch.cuda.is_available(),
    )


class Printer(TrainerCallback):
    """One line per step."""

    def __init__(self) -> None:
        self.steps: list[dict[str, Any]] = []

    def on_log(self, args: Any, state: Any, control: Any, logs: dict[str, Any] | None = None, **rest: Any) -> None:
        """One line, at the end of a step."""
        if logs is None or "reward" not in logs:
            return
        if not self.steps:
            print("step  reward  turns  tool failures  waited s   mean gap", flush=True)
        self.steps.append(logs)
        print(
            f"{state.global_step:>4}  {logs['reward']:>6.3f}  {logs['seer/turns_mean']:>5.2f}  "
            f"{logs['seer/tool_failures']:>13.0f}  {logs['seer/tool_wait_s']:>8.2f}  "
            f"{logs['seer/on_policy/mean_gap']:>9.1e}",
            flush=True,
        )


def read_arguments() -> argparse.Namespace:
    """The options. Defaults are small, for a CPU."""
    parser = argparse.ArgumentParser(description="GRPO with TRL and a Python tool, rolled out by Seer.")
    parser.add_argument("--model", default="smollm2", help="a Hugging Face folder, or a name of `seer model get`")
    parser.add_argument("--tiny", action="store_true", help="a tiny model of random weights instead")
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument("--instances", type=int, default=2)
    parser.add_argument("--group-size", type=int, default=8)
    parser.add_argument("--prompts-per-step", type=int, default=4)
    parser.add_argument("--num-prompts", type=int, default=64)
    parser.add_argument("--max-tokens", type=int, default=None, help="tokens that the model generates, over all turns")
    parser.add_argument("--max-num-seqs", type=int, default=16)
    parser.add_argument("--kv-memory-mib", type=int, default=256, help="of each instance")
    parser.add_argument("--learning-rate", type=float, default=None)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--output-dir", type=Path, default=Path("out/tools"))
    args = parser.parse_args()
    if args.learning_rate is None:
        args.learning_rate = 3e-3 if args.tiny else 2e-6
    if args.max_tokens is None:
        args.max_tokens = 24 if args.tiny else 256
    return args


if __name__ == "__main__":
    main()
