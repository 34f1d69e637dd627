# SPDX-License-Identifier: Apache-2.0
"""Does the simulator predict a run from the step cost of another one? Every run of some folders from every other.

    python benchmarks/simulator/held_out.py FOLDER ... [--across-instances] [--most 0.1]

A folder is the --out of benchmarks/rollout/gpu.py or cpu.py (its events-*.jsonl), or a run's folder of `seer rollout`.
What a step, a prompt token and a load cost is taken from run A alone; of run B come the lengths of its responses, its
scheduler and the limits of its instances. A and B are runs of one engine with an equal number of instances, or of any
number with --across-instances: right where each instance has its own cores or GPU. Runs that differ in nothing but
their repetition are not held out, and are not paired. Exits with 1 if an error exceeds --most.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from seer.analysis.whatif import RecordedRun, read_recorded, recorded_run, replay_under
from seer.metrics.jsonl import read_events, read_header
from seer.runs.run_folder import RunFolder
from seer.types import InstanceLimits
from stamp import print_stamp


@dataclass(frozen=True)
class Measured:
    """A run, by name."""

    name: str
    run: RecordedRun

    @property
    def settings(self) -> tuple[Any, ...]:
        """What makes a run another one; repetitions have equal ones."""
        run = self.run
        return run.scheduler, run.limits


def runs_of(folder: Path, max_tokens: int) -> Iterator[Measured]:
    """The runs of one folder."""
    logs = sorted(folder.glob("events-*.jsonl"))
    for path in logs:
        yield Measured(f"{folder.name}/{path.stem.removeprefix('events-')}", read_log(path, max_tokens))
    if not logs:
        yield Measured(folder.name, read_recorded(RunFolder(folder)))


def read_log(path: Path, max_tokens: int) -> RecordedRun:
    """A run that a benchmark of benchmarks/rollout has written."""
    about = read_header(path).metadata
    num_instances, *scheduler, _ = path.stem.removeprefix("events-").split("-")
    name = about.get("scheduler") or "-".join(scheduler)
    block_size = about.get("block_size", 16)
    limits = InstanceLimits(
        kv_blocks=about["kv_tokens"] // block_size,
        block_size=block_size,
        max_num_seqs=about["max_num_seqs"],
        max_model_len=about.get("max_model_len", 1 << 15),
    )
    return recorded_run(
        list(read_events(path)),
        scheduler=name.removesuffix("/off").removesuffix("-off"),
        limits=[limits] * int(num_instances),
        max_tokens=about.get("max_tokens", max_tokens),
        chunk_tokens=None,
    )


def predict(fitted: RecordedRun, other: RecordedRun) -> float:
    """Seconds of the other run at the costs of the fitted one."""
    costs = {"fit": fitted.fit, "gains": fitted.gains, "load_token_s": fitted.load_token_s}
    return replay_under(replace(other, **costs), other.scheduler).makespan_s


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folders", type=Path, nargs="+")
    parser.add_argument("--across-instances", action="store_true")
    parser.add_argument("--max-tokens", type=int, default=4096, help="limit of a response, where a log does not say it")
    parser.add_argument("--most", type=float, default=0.1, help="largest error that is accepted")
    args = parser.parse_args()
    print_stamp(args)
    found = [run for folder in args.folders for run in runs_of(folder, args.max_tokens)]
    print("| fitted on | predicted | measured s | predicted s | error |\n|---|---|---|---|---|")
    errors: list[float] = []
    for fitted in found:
        for other in found:
            is_near = args.across_instances or len(fitted.run.limits) == len(other.run.limits)
            if fitted.settings == other.settings or not is_near:
                continue
            seconds = predict(fitted.run, other.run)
            errors.append(seconds / other.run.makespan_s - 1)
            print(
                f"| {fitted.name} | {other.name} | {other.run.makespan_s:.1f} | {seconds:.1f} | {errors[-1]:+.1%} |",
                flush=True,
            )
    num_within = sum(abs(error) <= args.most for error in errors)
    print(f"\n{num_within} of {len(errors)} within {args.most:.0%}; worst {max(errors, key=abs, default=0.0):+.1%}")
    return int(num_within < len(errors) or not errors)


if __name__ == "__main__":
    sys.exit(main())
