# SPDX-License-Identifier: Apache-2.0
"""GRPO in verl on GPUs: Seer's rollout against verl's own, same prompts in the same order, times and rewards per step.

    python benchmarks/verl/gpu.py --model FOLDER --out DIR [--rollouts vllm,seer] [--steps 20] [--gpus 1] [SETTING ...]

Runs examples/grpo_verl/train.sh once for each rollout, one after the other; with --together both at once, step by step
in turns (taking_turns.py). A SETTING is one of verl's, for both runs; `--seer NAME=VALUE` is one of Seer's
(`custom.seer.NAME`), `--stock NAME=VALUE` one of verl's for the other. Sampled tokens differ between the two.
DIR/ROLLOUT.jsonl has verl's metrics of every step, DIR/ROLLOUT.log the output, DIR/summary.json the stamp, means and
ranges. What runs for longer than --limit-s is ended, and the steps until then count.

Times are verl's: `timing_s/gen` is the rollout, whose end it sees within 0.1 s here (often_polled.py; by itself it
looks every two seconds), `timing_s/step` a whole step. `seer/rollout_s` is the rollout by Seer's own clock. The first
two steps are not in the means: they compile kernels. Only steps that all runs have are counted. Where the package
flash-attn is missing, the trainers take PyTorch's attention, and log-probabilities as many_rows.py does.

A check without a GPU takes model, data and settings from tests/verl_training/verl_toy.py (make_toy, CPU_SETTINGS):
    python benchmarks/verl/gpu.py --model TOY/model --data TOY --reward FILE --out DIR --steps 3 CPU_SETTINGS...
"""

from __future__ import annotations

import argparse
import contextlib
import fcntl
import importlib.util
import json
import os
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping
from importlib.metadata import version
from pathlib import Path
from typing import Any

HERE = Path(__file__).resolve().parent
sys.path[:0] = [str(HERE.parent), str(HERE.parent / "grpo")]

from recorded_questions import questions
from word_problems import problems

from stamp import QWEN_MIX, as_text, take_stamp
from turns import await_turn

TURNS, STEPS = "SEER_BENCHMARK_TURNS", "SEER_BENCHMARK_STEPS"
"""Of taking_turns.py, which is imported in verl's process only."""
TURNS_FILE = "turns"

SCRIPT = HERE.parents[1] / "examples/grpo_verl/train.sh"
WARM_UP_STEPS = 2
WITHOUT_FLASH_ATTN = "+actor_rollout_ref.model.override_config.attn_implementation=sdpa"
"""verl's default needs that package."""
MODULES = "VERL_USE_EXTERNAL_MODULES"
END_S = 30.0
"""For a run that was told to end."""
SHOWN = {"rollout s": "timing_s/gen", "step s": "timing_s/step", "rollout s, own clock": "seer/rollout_s"}
REWARD = "critic/score/mean"


def main() -> None:
    args = read_arguments()
    args.out.mkdir(parents=True, exist_ok=True)
    if args.data is None:
        args.data = args.out
        write_problems(args)
    rollouts = args.rollouts.split(",")
    turns = [rollouts] if args.together else [[rollout] for rollout in rollouts]
    runs = {rollout: steps for turn in turns for rollout, steps in train(args, turn).items()}
    common = min(len(steps) for steps in runs.values())
    stamp = take_stamp(args, **{name: version(name) for name in ("verl", "ray")})
    summary = {"stamp": stamp, **{rollout: summarize(steps[:common]) for rollout, steps in runs.items()}}
    (args.out / "summary.json").write_text(json.dumps(summary, indent=1))
    print(as_text(stamp))
    for rollout, steps in runs.items():
        print(rollout, json.dumps(summary[rollout]))
        print("  reward", " ".join(f"{step[REWARD]:.2f}" for step in steps))


def read_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", type=Path, required=True)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--data", type=Path, help="a folder with train.parquet and val.parquet instead of --questions")
    parser.add_argument(
        "--questions",
        default="generated",
        choices=("generated", "recorded"),
        help="short word problems (../grpo/word_problems.py), or mathematics (recorded_questions.py; Qwen's tokenizer)",
    )
    parser.add_argument("--reward", type=Path, default=HERE / "reward.py", help="file with compute_score")
    parser.add_argument("--rollouts", default="vllm,seer")
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument("--gpus", type=int, default=1)
    parser.add_argument("--prompts", type=int, default=64)
    parser.add_argument("--prompt-tokens", type=int, default=256)
    parser.add_argument("--response-tokens", type=int, default=1024)
    parser.add_argument("--seed", type=int, default=7, help="of the order of prompts")
    parser.add_argument("--together", action="store_true", help="all rollouts at once, their steps in turns")
    parser.add_argument("--apart-s", type=float, default=60.0, help="between their starts: vLLM measures free memory")
    parser.add_argument("--go", type=Path, help="with --together: no step begins before this file is there")
    parser.add_argument("--limit-s", type=float, default=86_400.0, help="of one run, or of all together")
    parser.add_argument("--seer", action="append", default=[], metavar="NAME=VALUE")
    parser.add_argument("--stock", action="append", default=[], metavar="NAME=VALUE")
    parser.add_argument("settings", nargs="*", metavar="SETTING")
    return parser.parse_args()


def train(args: argparse.Namespace, rollouts: list[str]) -> dict[str, list[dict[str, float]]]:
    """Training runs side by side; verl's metrics of the steps of each."""
    deadline_s = time.monotonic() + args.limit_s
    with contextlib.ExitStack() as opened:
        folder = Path(opened.enter_context(tempfile.TemporaryDirectory(prefix="verl-")))
        with (folder / TURNS_FILE).open("w") as turn:
            fcntl.flock(turn, fcntl.LOCK_EX)
            runs: dict[str, subprocess.Popen[bytes]] = {}
            for rollout in rollouts:
                time.sleep(args.apart_s if runs else 0.0)
                runs[rollout] = start(args, rollout, folder, opened)
            await_turn(args.go, args.limit_s, goes_on=lambda: all(run.poll() is None for run in runs.values()))
        codes = await_all(runs, deadline_s)
    for rollout, code in codes.items():
        if code not in (0, None):
            sys.exit(f"verl ended with {code} under rollout.name={rollout}: see {args.out / f'{rollout}.log'}")
    return {rollout: steps_of(args, rollout) for rollout in rollouts}


def start(
    args: argparse.Namespace, rollout: str, folder: Path, opened: contextlib.ExitStack
) -> subprocess.Popen[bytes]:
    """One training; `folder` is for its Ray, and for the turns of several."""
    metrics = metrics_of(args, rollout)
    metrics.unlink(missing_ok=True)
    prefix, given = ("+actor_rollout_ref.rollout.custom.seer.", args.seer) if rollout == "seer" else ("", args.stock)
    own = [f"{prefix}{one}" for one in given]
    ray_dir = folder / rollout  # short: Ray makes sockets in it
    environ = environment(args, rollout, metrics)
    if args.together:
        environ |= {TURNS: str(folder / TURNS_FILE), STEPS: str(args.steps)}
    log = opened.enter_context((args.out / f"{rollout}.log").open("wb"))
    command = [str(SCRIPT), *settings_of(args, str(ray_dir)), *attention(args.settings), *args.settings, *own]
    run = subprocess.Popen(command, cwd=args.out, env=environ, stdout=log, stderr=log, start_new_session=True)
    opened.callback(end, run)
    return run


def await_all(runs: dict[str, subprocess.Popen[bytes]], deadline_s: float) -> dict[str, int | None]:
    """Exit codes. When one fails, or at the deadline, those that still run are ended; their code is None."""
    while time.monotonic() < deadline_s and not any(run.poll() for run in runs.values()):
        if all(run.poll() == 0 for run in runs.values()):
            break
        time.sleep(0.5)
    return {rollout: end(run) for rollout, run in runs.items()}


def end(run: subprocess.Popen[bytes]) -> int | None:
    """The exit code of a run; None if it still ran, and was ended."""
    if run.poll() is not None:
        return run.returncode
    for number in (signal.SIGTERM, signal.SIGKILL):
        os.killpg(run.pid, number)
        with contextlib.suppress(subprocess.TimeoutExpired):
            run.wait(END_S)
            break
    return None


def metrics_of(args: argparse.Namespace, rollout: str) -> Path:
    return args.out.absolute() / f"{rollout}.jsonl"


def steps_of(args: argparse.Namespace, rollout: str) -> list[dict[str, float]]:
    metrics = metrics_of(args, rollout)
    if not metrics.exists():
        sys.exit(f"rollout.name={rollout} had no step within its limit: see {args.out / f'{rollout}.log'}")
    return [json.loads(line)["data"] for line in metrics.read_text().splitlines()]


def settings_of(args: argparse.Namespace, ray_dir: str) -> list[str]:
    return [
        f"+ray_kwargs.ray_init._temp_dir={ray_dir}",
        f"reward.custom_reward_function.path={args.reward.absolute()}",
        f"data.seed={args.seed}",
        f"trainer.v1.sampler.custom_sampler.path={HERE / 'often_polled.py'}",
        "trainer.v1.sampler.custom_sampler.name=OftenPolled",
        f"trainer.total_training_steps={args.steps}",
        "trainer.val_before_train=False",
        "trainer.test_freq=-1",
        "trainer.save_freq=-1",
        "trainer.resume_mode=disable",
    ]


def has_flash_attn() -> bool:
    return importlib.util.find_spec("flash_attn") is not None


def attention(given: list[str]) -> list[str]:
    """What the trainer's attention needs here, but for settings that are given anyway."""
    if has_flash_attn():
        return []
    names = {setting.partition("=")[0].lstrip("+") for setting in given}
    return [] if WITHOUT_FLASH_ATTN.partition("=")[0].lstrip("+") in names else [WITHOUT_FLASH_ATTN]


def environment(args: argparse.Namespace, rollout: str, metrics: Path) -> dict[str, str]:
    return {
        **os.environ,
        **({} if has_flash_attn() else with_many_rows(os.environ)),
        "PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}",
        "VERL_FILE_LOGGER_PATH": str(metrics),
        "MODEL": str(args.model.absolute()),
        "DATA": str(args.data.absolute()),
        "ROLLOUT": rollout,
        "GPUS": str(args.gpus),
        "PROMPTS": str(args.prompts),
        "PROMPT_TOKENS": str(args.prompt_tokens),
        "RESPONSE_TOKENS": str(args.response_tokens),
    }


def with_many_rows(environ: Mapping[str, str]) -> dict[str, str]:
    """For verl's processes: import many_rows.py too."""
    modules = [environ.get(MODULES, ""), "many_rows"]
    paths = [str(HERE), environ.get("PYTHONPATH", "")]
    return {MODULES: ",".join(filter(None, modules)), "PYTHONPATH": os.pathsep.join(filter(None, paths))}


def summarize(steps: list[dict[str, float]]) -> dict[str, Any]:
    """Means and ranges over the steps after the first two, and the reward at the beginning and the end."""
    counted = steps[WARM_UP_STEPS:] or steps
    found: dict[str, Any] = {"steps": len(counted)}
    for name, metric in SHOWN.items():
        values = [step[metric] for step in counted if metric in step]
        if values:
            found[name] = {"mean": round(statistics.fmean(values), 3), "range": [min(values), max(values)]}
    found["reward"] = [round(steps[0][REWARD], 3), round(steps[-1][REWARD], 3)]
    return found


def write_problems(args: argparse.Namespace) -> None:
    """The questions as verl reads them."""
    import pandas

    found = questions(QWEN_MIX, args.model) if args.questions == "recorded" else problems(4096, args.seed)
    rows = [
        {
            "data_source": args.questions,
            "prompt": row["prompt"],
            "ability": "math",
            "reward_model": {"style": "rule", "ground_truth": str(row["answer"])},
            "extra_info": {"index": number},
        }
        for number, row in enumerate(found)
    ]
    pandas.DataFrame(rows).to_parquet(args.data / "train.parquet")
    pandas.DataFrame(rows[:64]).to_parquet(args.data / "val.parquet")


if __name__ == "__main__":
    main()
