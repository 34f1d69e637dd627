# SPDX-License-Identifier: Apache-2.0
"""GRPO in verl on GPUs: Seer's rollout against verl's own, same prompts in the same order, times and rewards per step.

    python benchmarks/verl/gpu.py --model FOLDER --out DIR [--rollouts vllm,seer] [--steps 20] [--gpus 1] [SETTING ...]

Runs examples/grpo_verl/train.sh once for each rollout, one after the other. A SETTING is one of verl's, for both runs;
`--seer NAME=VALUE` is one of Seer's (`custom.seer.NAME`). Sampled tokens differ between the two. DIR/ROLLOUT.jsonl has
verl's metrics of every step, DIR/ROLLOUT.log the output, DIR/summary.json the stamp, means and ranges.

Times are verl's: `timing_s/gen` is the rollout, whose end it sees within 0.1 s here (often_polled.py; by itself it
looks every two seconds), `timing_s/step` a whole step. `seer/rollout_s` is the rollout by Seer's own clock. The first
two steps are not in the means: they compile kernels. Where the package flash-attn is missing, the trainer of both runs
pads its batches and takes PyTorch's attention.

A check without a GPU takes model, data and settings from tests/verl_training/verl_toy.py (make_toy, CPU_SETTINGS):
    python benchmarks/verl/gpu.py --model TOY/model --data TOY --reward FILE --out DIR --steps 3 CPU_SETTINGS...
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import os
import statistics
import subprocess
import sys
import tempfile
from importlib.metadata import version
from pathlib import Path
from typing import Any

HERE = Path(__file__).resolve().parent
sys.path[:0] = [str(HERE.parent), str(HERE.parent / "grpo")]

from stamp import as_text, take_stamp

SCRIPT = HERE.parents[1] / "examples/grpo_verl/train.sh"
WARM_UP_STEPS = 2
WITHOUT_FLASH_ATTN = (
    "actor_rollout_ref.model.use_remove_padding=False",
    "+actor_rollout_ref.model.override_config.attn_implementation=sdpa",
)
"""verl's defaults need that package."""
SHOWN = {"rollout s": "timing_s/gen", "step s": "timing_s/step", "rollout s, own clock": "seer/rollout_s"}
REWARD = "critic/score/mean"


def main() -> None:
    args = read_arguments()
    args.out.mkdir(parents=True, exist_ok=True)
    if args.data is None:
        args.data = args.out
        write_problems(args.data, args.seed)
    runs = {rollout: train(args, rollout) for rollout in args.rollouts.split(",")}
    stamp = take_stamp(args, **{name: version(name) for name in ("verl", "ray")})
    summary = {"stamp": stamp, **{rollout: summarize(steps) for rollout, steps in runs.items()}}
    (args.out / "summary.json").write_text(json.dumps(summary, indent=1))
    print(as_text(stamp))
    for rollout, steps in runs.items():
        print(rollout, json.dumps(summary[rollout]))
        print("  reward", " ".join(f"{step[REWARD]:.2f}" for step in steps))


def read_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", type=Path, required=True)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument(
        "--data", type=Path, help="a folder with train.parquet and val.parquet (generated word problems)"
    )
    parser.add_argument("--reward", type=Path, default=HERE / "reward.py", help="file with compute_score")
    parser.add_argument("--rollouts", default="vllm,seer")
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument("--gpus", type=int, default=1)
    parser.add_argument("--prompts", type=int, default=64)
    parser.add_argument("--prompt-tokens", type=int, default=256)
    parser.add_argument("--response-tokens", type=int, default=1024)
    parser.add_argument("--seed", type=int, default=7, help="of the order of prompts")
    parser.add_argument("--seer", action="append", default=[], metavar="NAME=VALUE")
    parser.add_argument("settings", nargs="*", metavar="SETTING")
    return parser.parse_args()


def train(args: argparse.Namespace, rollout: str) -> list[dict[str, float]]:
    """One training run; verl's metrics of its steps."""
    metrics = args.out.absolute() / f"{rollout}.jsonl"
    metrics.unlink(missing_ok=True)
    own = [f"+actor_rollout_ref.rollout.custom.seer.{one}" for one in args.seer] if rollout == "seer" else []
    with tempfile.TemporaryDirectory(prefix="ray-") as ray_dir, (args.out / f"{rollout}.log").open("wb") as log:
        command = [str(SCRIPT), *settings_of(args, ray_dir), *attention(args.settings), *args.settings, *own]
        code = subprocess.run(
            command, cwd=args.out, env=environment(args, rollout, metrics), stdout=log, stderr=log, check=False
        ).returncode
    if code != 0:
        sys.exit(f"verl ended with {code} under rollout.name={rollout}: see {args.out / f'{rollout}.log'}")
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


def attention(given: list[str]) -> list[str]:
    """What the trainer's attention needs here, but for settings that are given anyway."""
    if importlib.util.find_spec("flash_attn") is not None:
        return []
    names = {setting.partition("=")[0].lstrip("+") for setting in given}
    return [one for one in WITHOUT_FLASH_ATTN if one.partition("=")[0].lstrip("+") not in names]


def environment(args: argparse.Namespace, rollout: str, metrics: Path) -> dict[str, str]:
    return {
        **os.environ,
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


def write_problems(folder: Path, seed: int) -> None:
    """Word problems as verl reads them."""
    import pandas
    from word_problems import problems

    rows = [
        {
            "data_source": "word_problems",
            "prompt": row["prompt"],
            "ability": "math",
            "reward_model": {"style": "rule", "ground_truth": str(row["answer"])},
            "extra_info": {"index": number},
        }
        for number, row in enumerate(problems(4096, seed))
    ]
    pandas.DataFrame(rows).to_parquet(folder / "train.parquet")
    pandas.DataFrame(rows[:64]).to_parquet(folder / "val.parquet")


if __name__ == "__main__":
    main()
