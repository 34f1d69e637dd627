# SPDX-License-Identifier: Apache-2.0
"""GRPO with TRL, with rollouts by Seer: sums from reasoning-gym, checked by its verifier.

    python examples/grpo_trl/train.py --tiny                  # a minute; a tiny model with random weights
    seer model get smollm2
    python examples/grpo_trl/train.py --steps 20              # SmolLM2-135M on two CPU instances
    seer report out/grpo/seer                                 # reward, lengths, time, the on-policy check, the timeline

The lines that Seer adds to a plain TRL script are marked `Seer`. Each step prints its reward, the mean response length,
the time of its rollout and its share of the step, and two estimates: the speed against verl's synchronous dispatch, and
the share of the speed of an oracle that knows every length. The estimates replay the same responses at the measured
step cost, in virtual time.
"""

from __future__ import annotations

import argparse
import os
import re
from pathlib import Path
from typing import Any

os.environ.setdefault("TRL_EXPERIMENTAL_SILENCE", "1")

import reasoning_gym
import torch
from datasets import Dataset
from tiny_model import tiny_model, tiny_tokenizer
from transformers import AutoModelForCausalLM, AutoTokenizer, PrinterCallback, TrainerCallback
from trl import GRPOConfig, GRPOTrainer

from seer.analysis.whatif import read_recorded, replay_under
from seer.engine.local.models_get import find_model
from seer.errors import InputError
from seer.integrations.trl import SeerRollouts, early_reward, seer_rollouts  # Seer
from seer.runs.run_folder import RunFolder

ASK = "\nAnswer with the number alone."


def main() -> None:
    """Train."""
    args = read_arguments()
    task = reasoning_gym.create_dataset(
        "chain_sum", size=args.num_prompts, seed=args.seed, min_terms=2, max_terms=2, min_digits=1, max_digits=1
    )
    questions = {entry["question"]: entry for entry in task}  # no duplicates: a reward finds its row by the prompt
    rows = [
        {"prompt": as_prompt(entry, args), "index": entry["metadata"]["source_index"]} for entry in questions.values()
    ]

    @early_reward  # Seer: called as each response ends, while others are still being generated
    def correct(completion: Any, index: int, **row: Any) -> float:
        text = completion if isinstance(completion, str) else completion[0]["content"]
        numbers = re.findall(r"-?\d+", text)
        if not numbers:
            return 0.0
        # A tenth for any number, so that a model that does not yet answer with numbers gets a reward to learn from.
        return 0.1 + 0.9 * float(task.score_answer(numbers[-1], task[index]) == 1.0)

    model: Any
    tokenizer: Any
    if args.tiny:
        model, tokenizer = tiny_model(args.seed), tiny_tokenizer()
    else:
        folder = find_model(args.model)
        # float32, as the instances compute on a CPU, so that the on-policy check is exact up to rounding.
        model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
        tokenizer = AutoTokenizer.from_pretrained(folder)
    with seer_rollouts(  # Seer
        reward=correct,
        instances=args.instances,
        max_num_seqs=args.max_num_seqs,
        kv_memory_bytes=args.kv_memory_mib << 20,
    ) as rollouts:
        trainer = GRPOTrainer(
            model=model,
            processing_class=tokenizer,
            reward_funcs=correct,
            train_dataset=Dataset.from_list(rows),
            args=configuration(args),
            rollout_func=rollouts,  # Seer: the only line that a TRL script needs
            callbacks=[Printer(rollouts)],
        )
        trainer.remove_callback(PrinterCallback)  # the trainer's own, which prints every number of a step
        trainer.train()
    print(f"\nseer report {args.output_dir / 'seer'}")


def as_prompt(entry: dict[str, Any], args: argparse.Namespace) -> Any:
    """A conversation for a chat model, the bare sum for the tiny one."""
    if args.tiny:
        return entry["metadata"]["expression"].replace(" ", "") + "="
    return [{"role": "user", "content": entry["question"] + ASK}]


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

    def __init__(self, rollouts: SeerRollouts) -> None:
        self._rollouts = rollouts

    def on_train_begin(self, args: Any, state: Any, control: Any, **rest: Any) -> None:
        """The heading."""
        print("step  reward  tokens  rollout s  share  vs verl-sync  of oracle   mean gap", flush=True)

    def on_log(self, args: Any, state: Any, control: Any, logs: dict[str, Any] | None = None, **rest: Any) -> None:
        """One line, at the end of a step."""
        if logs is None or "reward" not in logs:
            return
        rollout_s, share = logs["seer/rollout_s"], logs["seer/rollout_s"] / logs["step_time"]
        length, gap = logs["completions/mean_length"], logs["seer/on_policy/mean_gap"]
        estimate = estimated_speed(self._rollouts.newest_step)
        print(
            f"{state.global_step:>4}  {logs['reward']:>6.3f}  {length:>6.1f}  {rollout_s:>9.2f}  {share:>5.0%}  "
            f"{estimate}   {gap:>8.1e}",
            flush=True,
        )


def estimated_speed(step: RunFolder | None) -> str:
    """The step replayed in virtual time at its measured step cost, without speculation."""
    try:
        recorded = read_recorded(step) if step is not None else None
    except InputError:  # too few steps to measure their cost
        recorded = None
    if recorded is None:
        return f"{'-':>12}  {'-':>9}"
    schedulers = (recorded.scheduler, "verl-sync", "oracle")
    own_s, verl_s, oracle_s = (replay_under(recorded, scheduler).makespan_s for scheduler in schedulers)
    return f"{verl_s / own_s:>11.2f}x  {oracle_s / own_s:>9.0%}"


def read_arguments() -> argparse.Namespace:
    """The options. Defaults are small, for a CPU."""
    parser = argparse.ArgumentParser(description="GRPO with TRL, rolled out by Seer.")
    parser.add_argument("--model", default="smollm2", help="a Hugging Face folder, or a name of `seer model get`")
    parser.add_argument("--tiny", action="store_true", help="a tiny model of random weights instead")
    parser.add_argument("--steps", type=int, default=10)
    parser.add_argument("--instances", type=int, default=2)
    parser.add_argument("--group-size", type=int, default=8)
    parser.add_argument("--prompts-per-step", type=int, default=4)
    parser.add_argument("--num-prompts", type=int, default=200)
    parser.add_argument("--max-tokens", type=int, default=48)
    parser.add_argument("--max-num-seqs", type=int, default=16)
    parser.add_argument("--kv-memory-mib", type=int, default=256, help="of each instance")
    parser.add_argument("--learning-rate", type=float, default=None)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--output-dir", type=Path, default=Path("out/grpo"))
    args = parser.parse_args()
    if args.learning_rate is None:
        args.learning_rate = 3e-3 if args.tiny else 2e-6
    return args


if __name__ == "__main__":
    main()
