# SPDX-License-Identifier: Apache-2.0
"""GRPO on one GPU: Seer's rollouts against TRL's own, same seeds, same batches, reward and time per step.

    python benchmarks/grpo/gpu.py --model FOLDER --out DIR [--arms seer,seer-vllm,vllm] [--steps 20] [--limit-s 540]
    python benchmarks/grpo/gpu.py --tiny --out DIR --steps 2 --arms seer,seer-vllm     a check without a GPU

Arms, each in a process of its own, one after the other:
    seer           rollout_func=seer_rollouts(): the local engine in a child process on the same GPU
    seer-vllm      rollout_func=seer_rollouts(engine="vllm"): stock vLLM in child processes on the same GPU, drafts on
                   the GPU, weights handed over in place
    vllm           TRL with use_vllm=True, vllm_mode="colocate"
    transformers   TRL with transformers' generate

Trainer, task, seeds, learning rate and batch are the same for all arms. Sampled tokens are not: each engine has its own
random numbers. DIR/ARM.jsonl gets one line per step, DIR/ARM.log the arm's output, DIR/ARM-logs what Seer's instances
write, DIR/summary.json the stamp and the means over the steps after the first two. What an arm reaches (trainer built,
instances up, weights handed over, each step) is printed at once with the seconds since the arm's start; while it is
silent, the newest line of its logs is. pack.py (beside this file) packs the wheels for a machine without a package
index.

`--limit-s` is for all arms together. An arm stops by itself when two more steps might not fit; at its limit it is
ended, its steps until then count, and its log has the stack of every process. `--go FILE` lets an arm that was started
early wait after its first step until FILE exists, so that starting goes on beside other work and measuring does not.
It holds its GPU memory meanwhile, and `--limit-s` goes on.

Times: `rollout_s` is the whole call that makes completions, with the transfer of new weights to the engine. `step_s` is
the time from the end of one optimizer step to the next.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import resource
import select
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

os.environ.setdefault("TRL_EXPERIMENTAL_SILENCE", "1")
os.environ.setdefault("HF_HUB_OFFLINE", "1")
HERE = Path(__file__).resolve().parent
sys.path[:0] = [str(HERE.parents[1] / "src"), str(HERE.parent)]

from stamp import as_text, print_stamp, take_stamp
from turns import await_turn

ARMS = ("seer", "seer-vllm", "vllm", "transformers")
WARM_UP_STEPS = 2
"""Not in the means: these steps compile kernels and allocate the optimizer's state."""
START_S = 150.0
"""Time for an arm to reach its first step. With less time left, no arm but the first is started."""
END_S = 10.0
"""Of an arm's limit: for the end of its instances."""
STACKS_S = 5.0
"""Time for the processes of an arm to write their stacks."""
QUIET_S = 15.0
"""Without news of the arm for so long, the newest line of its logs is shown."""
NEWS = "-- "
"""Begins a line of an arm's output that is also printed."""
SHOWN_CHARS = 160
"""Of a line of a log."""
PHASES = (
    "Initializing a V1 LLM",
    "grouped drafts",
    "oading took",
    "weights took",
    "torch.compile t",
    "apturing f",
    "init engine",
)
"""In lines of vLLM's log: what its start has done, and for how long."""
BEGAN_S = time.monotonic()


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
    stamp = print_stamp(args)
    refuse_half_a_package()
    arms = args.arms.split(",")
    statuses: dict[str, Any] = {}
    for number, arm in enumerate(arms):
        left_s = args.limit_s - (time.monotonic() - began_s)
        if number and left_s < min(START_S, args.limit_s / 4):
            statuses[arm] = "no time left"
            continue
        # Half of a time that is enough for one arm is enough for none: the first arms get it.
        share_s = left_s / max(1, min(len(arms) - number, int(left_s // START_S)))
        statuses[arm] = start_arm(args, arm, share_s)
        write_summary(args, statuses, stamp)
    print((args.out / "summary.json").read_text(), flush=True)


def refuse_half_a_package() -> None:
    """A checkout shadows an installed package, and lacks the native modules that were built into that one."""
    try:
        import seer.drafting.index
        import seer.kvpool.local  # noqa: F401
    except ImportError as error:
        copy = f"(cd SITE && find seer -name '*.so' -exec cp --parents {{}} {HERE.parents[1] / 'src'}/ \\;)"
        sys.exit(f"{error}\nCopy the native modules of the installed package into this checkout: {copy}")


def start_arm(args: argparse.Namespace, arm: str, limit_s: float) -> Any:
    """Exit status of the arm's process, or what failed. Without handles to GPU memory, it runs again without them."""
    (args.out / f"{arm}.jsonl").write_text("")
    for weights in dict.fromkeys((args.weights, "memory")) if arm.startswith("seer") else ("memory",):
        began_s = time.monotonic()
        command = [sys.executable, "-u", str(HERE / "gpu.py"), *sys.argv[1:], "--arm", arm, "--weights", weights]
        with tempfile.TemporaryDirectory(prefix="grpo-", ignore_cleanup_errors=True) as folder:
            command += ["--trainer-dir", folder, "--limit-s", f"{max(1.0, limit_s - END_S):.0f}"]
            print(f"{arm}: at most {limit_s:.0f} s, weights {weights}", flush=True)
            status = run_process(args, arm, command, limit_s)
        limit_s -= time.monotonic() - began_s
        print(f"{arm}: ended with {status}", flush=True)
        if status == 0 or len(read_lines(args.out / f"{arm}.jsonl")) > 1 or limit_s < START_S:
            break
    return {"status": status, "weights": weights} if arm.startswith("seer") else status


def run_process(args: argparse.Namespace, arm: str, command: list[str], limit_s: float) -> Any:
    """Run an arm to its end or its limit, and print what it says meanwhile. Its output goes straight to its log."""
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))  # `end_all` aborts processes, whose memory is large
    log = args.out / f"{arm}.log"
    deadline_s = time.monotonic() + limit_s
    with log.open("ab") as written, log.open("rb") as read:
        read.seek(0, os.SEEK_END)
        written.write(f"$ {' '.join(command)}\n".encode())
        written.flush()
        # A process that is aborted writes its stack first.
        environment = {**os.environ, "PYTHONFAULTHANDLER": "1"}
        process = subprocess.Popen(command, stdout=written, stderr=subprocess.STDOUT, env=environment)
        said_s, shown = time.monotonic(), ""
        while process.poll() is None and time.monotonic() < deadline_s:
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.wait(0.2)
            for line in news(read):
                print(line, flush=True)
                said_s = time.monotonic()
            if time.monotonic() - said_s > QUIET_S:
                said_s, newest = time.monotonic(), newest_line(args, arm)
                print(f"   {arm}: {newest if newest != shown else 'nothing new in its logs'}", flush=True)
                shown = newest
        is_over = process.poll() is not None
        if not is_over:
            print(f"   {arm}: at its limit, at {newest_line(args, arm)}; its logs have the stacks", flush=True)
            end_all(process)
        for line in news(read):
            print(line, flush=True)
    if is_over and process.returncode:
        print(f"   the end of {log}:\n{log.read_text(errors='replace')[-2000:]}", flush=True)
    return process.returncode if is_over else "ended at its limit"


def news(log: Any) -> Iterator[str]:
    """The lines for the terminal that were added to a log; a line that is not whole yet comes next time."""
    while True:
        at = log.tell()
        line = log.readline()
        if not line.endswith(b"\n"):
            log.seek(at)
            return
        if line.startswith(NEWS.encode()):
            yield line[len(NEWS) :].decode(errors="replace").rstrip()


def newest_line(args: argparse.Namespace, arm: str) -> str:
    """Of the arm's log, or of its instances', whichever was written last."""
    logs = [args.out / f"{arm}.log", *(args.out / f"{arm}-logs").glob("*.log")]
    newest = max((log for log in logs if log.stat().st_size), key=lambda log: log.stat().st_mtime)
    lines = [line.strip() for line in newest.read_text(errors="replace").split("\n") if not line.startswith(NEWS)]
    last = next((line for line in reversed(lines) if line), "")
    return f"{newest.name}: {last[:SHOWN_CHARS]}"


def end_all(process: subprocess.Popen[bytes]) -> None:
    """End a process with all that it has started; each writes its stacks to its log first.

    They are stopped before, and go on one after the other: one that waits for another would go on when that has ended,
    and write another stack; one that ends with another would be ended before it has written.
    """
    deadline_s = time.monotonic() + STACKS_S
    handles = []
    for pid in processes_of(process.pid):
        with contextlib.suppress(ProcessLookupError):
            handles.append(os.pidfd_open(pid))
    for number in (signal.SIGSTOP, signal.SIGABRT):
        for handle in handles:
            send(number, handle)
    for handle in reversed(handles):  # those that end with others first
        send(signal.SIGCONT, handle)
        select.select([handle], [], [], max(0.0, deadline_s - time.monotonic()))  # readable once it has ended
    for handle in handles:
        send(signal.SIGKILL, handle)
        os.close(handle)
    process.wait()


def send(number: signal.Signals, handle: int) -> None:
    with contextlib.suppress(ProcessLookupError):
        signal.pidfd_send_signal(handle, number)


def processes_of(pid: int) -> list[int]:
    """A process and all below it."""
    parents: dict[int, list[int]] = {}
    for stat in Path("/proc").glob("[0-9]*/stat"):
        with contextlib.suppress(OSError):
            parent = int(stat.read_text().rpartition(")")[2].split()[1])
            parents.setdefault(parent, []).append(int(stat.parent.name))
    found = [pid]
    for one in found:
        found += parents.get(one, [])
    return found


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


def say(text: str) -> None:
    """Print news of this arm, with the seconds since its process began."""
    print(f"{NEWS}{time.monotonic() - BEGAN_S:6.1f} s  {text}", flush=True)


def run_arm(args: argparse.Namespace) -> None:
    print(f"{as_text(take_stamp(args))}\n", flush=True)
    import torch
    from datasets import Dataset
    from datasets.table import InMemoryTable
    from transformers import AutoModelForCausalLM, AutoTokenizer
    from trl import GRPOConfig, GRPOTrainer
    from word_problems import problems, score

    say(f"{args.arm}: torch {torch.__version__} and TRL imported")
    if args.tiny:
        sys.path.insert(0, str(HERE.parents[1] / "examples" / "grpo_trl"))
        from tiny_model import tiny_model, tiny_tokenizer

        model, tokenizer = tiny_model(0), tiny_tokenizer()
        if args.arm == "seer-vllm":  # whose attention takes no heads of 16 values
            model.config.update({"hidden_size": 256, "head_dim": 64})
            model = type(model)(model.config)
        rows = [{"prompt": f"{i}+{i}=", "answer": 2 * i} for i in range(64)]
    else:
        # Float32 weights under bfloat16 autocast: at this learning rate, bfloat16 weights would lose most of each
        # update to rounding.
        model = AutoModelForCausalLM.from_pretrained(args.model, dtype=torch.float32)
        tokenizer = AutoTokenizer.from_pretrained(args.model)
        rows = problems(args.prompts_per_step * (args.steps + 1), args.seed)
    say("model loaded")

    def correct(completions: list[Any], answer: list[int], **rest: Any) -> list[float]:
        texts = [one if isinstance(one, str) else one[0]["content"] for one in completions]
        return [score(text, wanted) for text, wanted in zip(texts, answer, strict=True)]

    settings: dict[str, Any] = {}
    if args.arm == "vllm":
        settings = {"use_vllm": True, "vllm_mode": "colocate", "vllm_gpu_memory_utilization": args.vllm_memory}
        settings["vllm_max_model_length"] = args.max_tokens + 512
    batch = args.prompts_per_step * args.group_size
    config = GRPOConfig(
        output_dir=str(args.trainer_dir or args.out / f"{args.arm}-trainer"),
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
    rollouts = seers(args) if args.arm.startswith("seer") else None
    trainer = GRPOTrainer(
        model=model,
        processing_class=tokenizer,
        reward_funcs=correct,
        # A fixed fingerprint: datasets would pickle all of pyarrow to make one, which fails with some versions.
        train_dataset=Dataset(InMemoryTable.from_pylist(rows), fingerprint=f"rows-{args.seed}-{len(rows)}"),
        args=config,
        rollout_func=rollouts,
    )
    say("trainer built" + (", vLLM in it" if args.arm == "vllm" else ""))
    if rollouts is not None:
        say_how_instances_do(rollouts.instances, args)
    log_steps(trainer, args)
    trainer.train()
    say("training over")


def seers(args: argparse.Namespace) -> Any:
    from seer import HostingConfig
    from seer.integrations.trl import seer_rollouts

    hosting = HostingConfig(
        pin_cores=False,
        silence_deadline_s=60,
        progress_deadline_s=300,
        start_deadline_s=max(5.0, args.limit_s),
        call_deadline_s=60.0,  # weights take a second: what takes longer hangs
        log_dir=args.out / f"{args.arm}-logs",
        weights_in_place=args.weights == "in-place",
    )
    if args.tiny and args.arm == "seer":
        return seer_rollouts(kv_blocks=512, max_num_seqs=16, hosting=hosting)
    if args.tiny:
        small: dict[str, Any] = {"kv_memory_bytes": 64 << 20, "max_num_seqs": 8, "max_model_len": 128}
        return seer_rollouts(engine="vllm", dtype="float32", speculation="off", hosting=hosting, **small)
    own = {"engine_settings": json.loads(args.engine_settings)} if args.engine_settings else {}
    return seer_rollouts(
        engine="vllm" if args.arm == "seer-vllm" else "local",
        instances=args.instances,
        max_num_seqs=args.max_num_seqs,
        kv_memory_bytes=int(args.kv_memory_gib * 2**30) // args.instances,
        max_model_len=args.max_tokens + 512,
        speculation=args.speculation,
        check_responses=16,
        hosting=hosting,
        **own,
    )


def say_how_instances_do(instances: Any, args: argparse.Namespace) -> None:
    """Print when they start, are up, and have new weights for the first time."""
    from seer.integrations.trl import instances as module

    sync_with, write_model_folder = instances.sync_with, module.write_model_folder
    num_calls = 0

    def written(trainer: Any) -> Path:
        setattr(module, "write_model_folder", write_model_folder)  # noqa: B010 - mypy knows it as imported
        began_s = time.monotonic()
        folder = write_model_folder(trainer)
        say(f"model's folder written in {time.monotonic() - began_s:.1f} s")
        return folder

    def timed(trainer: Any) -> Any:
        nonlocal num_calls
        began_s, were_up = time.monotonic(), instances.are_up
        num_calls += 1
        if not were_up:
            say(f"instances start, their logs are in {args.out / f'{args.arm}-logs'}")
        elif num_calls == 2:
            say(f"hands new weights over, {args.weights}")
        found = sync_with(trainer)
        took_s = time.monotonic() - began_s
        if not were_up:
            say(f"instances up in {took_s:.1f} s, the model's folder included")
            say_phases(args)
        elif num_calls == 2:
            say(f"new weights handed over in {took_s:.2f} s")
        return found

    setattr(module, "write_model_folder", written)  # noqa: B010 - mypy knows it as imported
    instances.sync_with = timed


def say_phases(args: argparse.Namespace) -> None:
    """Print what vLLM says of its start, with its own clock."""
    for log in sorted((args.out / f"{args.arm}-logs").glob("*.log")):
        for line in log.read_text(errors="replace").split("\n"):
            if any(phase in line for phase in PHASES):
                say(f"   {line.strip()[:SHOWN_CHARS]}")


def log_steps(trainer: Any, args: argparse.Namespace) -> None:
    """Time every call that makes completions, write one line per step, and stop before the limit."""
    import torch
    from transformers import TrainerCallback

    rollouts_s: list[float] = []
    generate = trainer._generate

    def timed(prompts: list[Any]) -> Any:
        started_s = time.monotonic()
        made = generate(prompts)
        rollouts_s.append(time.monotonic() - started_s)
        if trainer.state.global_step == 0:
            say(f"first responses after {rollouts_s[-1]:.1f} s")
        return made

    trainer._generate = timed
    path = args.out / f"{args.arm}.jsonl"
    path.write_text("")

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
                "at_s": now_s - BEGAN_S,
                "loss": logs.get("loss"),
                "seer_rollout_s": logs.get("seer/rollout_s"),  # without the on-policy check
                "weights_s": logs.get("seer/weights_s"),
                "tail_s": logs.get("seer/tail_s"),
                "mean_ratio": logs.get("seer/on_policy/mean_ratio"),
                "mean_gap": logs.get("seer/on_policy/mean_gap"),
                "largest_gap": logs.get("seer/on_policy/largest_gap"),
            }
            rollouts_s.clear()
            with path.open("a") as file:
                file.write(json.dumps(line) + "\n")
            say(as_news(line))
            if state.global_step == 1 and args.go is not None:
                if torch.cuda.is_available():
                    torch.cuda.empty_cache()
                say(f"waits for {args.go}")
                await_turn(args.go, max(0.0, args.limit_s - (time.monotonic() - BEGAN_S)))
            Writer.last_s = time.monotonic()
            # The first step has the engine's start in it, and says nothing of the next ones.
            next_s = line["step_s"] if state.global_step > 1 else line["rollout_s"] / 10
            if time.monotonic() - BEGAN_S + 2 * next_s > args.limit_s:
                say("stops here for its limit")
                control.should_training_stop = True

    trainer.add_callback(Writer())


def as_news(line: dict[str, Any]) -> str:
    """A step in one line."""
    parts = [f"step {line['step']}: {line['step_s']:.2f} s", f"rollout {line['rollout_s']:.2f} s"]
    if line["weights_s"] is not None and line["step"] > 1:  # in the first step: the start of the instances
        parts.append(f"weights {line['weights_s']:.2f} s")
    parts.append(f"{line['num_tokens']:.0f} tokens")
    parts.append(f"reward {line['reward']:.3f}")
    if line["mean_gap"] is not None:
        parts.append(f"mean gap {line['mean_gap']:.5f}")
    return ", ".join(parts)


def read_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", type=Path, help="a Hugging Face folder")
    parser.add_argument("--tiny", action="store_true", help="a tiny model on the CPU, to check this script")
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--arms", default="seer,vllm,transformers")
    parser.add_argument("--arm", choices=ARMS, help=argparse.SUPPRESS)
    parser.add_argument("--trainer-dir", type=Path, help=argparse.SUPPRESS)
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
    parser.add_argument("--engine-settings", help="of Seer's instances, as JSON; for one arm of Seer's at a time")
    parser.add_argument("--go", type=Path, metavar="FILE", help="wait for this file after the first step")
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
