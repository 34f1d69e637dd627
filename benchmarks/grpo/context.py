# SPDX-License-Identifier: Apache-2.0
"""What a prompt's responses of an earlier epoch are worth: as length estimates, and as text to draft from.

    python benchmarks/grpo/context.py lengths [--workloads qwen2-vl-72b] [--seeds 0,1,2]
    python benchmarks/grpo/context.py tokens [--recording FILE.npz ...]

lengths   In simulation. Each group's lengths are drawn twice from one difficulty: the first draw is the earlier epoch
          and gives the estimate (its longest response), the second is rolled out. `drifted` scales the estimate, as if
          responses had become longer or shorter since then. The rollout loop and the schedulers are the real ones.
tokens    By exact replay of recordings (../recordings). The last response of each group is drafted, with k responses of
          the earlier epoch known and no sibling finished (the start of a rollout) or four. All responses were sampled
          from one policy; drift is not covered.
"""

from __future__ import annotations

import argparse
import statistics
import sys
from dataclasses import replace
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from seer.drafting.index import DraftOptions
from seer.drafting.offline_replay import replay
from seer.drafting.recording import read_groups
from seer.sim.cluster import simulate
from seer.sim.workloads import PAPER, Workload, paper_workload
from stamp import QWEN_MIX, RECORDINGS, print_stamp

ESTIMATES = {"none": None, "known": 1.0, "drifted x0.8": 0.8, "drifted x1.25": 1.25}
BUDGET = 8
DEFAULT_RECORDINGS = [RECORDINGS / "drafts_humaneval.npz", RECORDINGS / "drafts_game24.npz", QWEN_MIX]
FINISHED_SIBLINGS = (0, 4)
PAST_RESPONSES = (0, 1, 4)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("part", choices=("lengths", "tokens"))
    parser.add_argument("--workloads", default="qwen2-vl-72b")
    parser.add_argument("--schedulers", default="context,seer")
    parser.add_argument("--seeds", default="0,1,2")
    parser.add_argument("--recording", type=Path, nargs="+", default=DEFAULT_RECORDINGS)
    args = parser.parse_args()
    print_stamp(args)
    if args.part == "lengths":
        lengths(args.workloads.split(","), args.schedulers.split(","), [int(seed) for seed in args.seeds.split(",")])
    else:
        for path in args.recording:
            tokens(path)


def lengths(workloads: list[str], schedulers: list[str], seeds: list[int]) -> None:
    say = sys.stdout.write
    say("| workload | scheduler | estimate | makespan s | against none | tail s |\n|---|---|---|---|---|---|\n")
    for name in workloads:
        drawn = {seed: two_epochs(name, seed) for seed in seeds}
        for scheduler in schedulers:
            first: dict[int, float] = {}
            for label, scale in ESTIMATES.items():
                runs = []
                for seed, (workload, longest) in drawn.items():
                    length_hints = (
                        None if scale is None else {key: max(1, round(scale * one)) for key, one in longest.items()}
                    )
                    runs.append(simulate(workload, scheduler, speculation="off", length_hints=length_hints).summary)
                    first.setdefault(seed, runs[-1].makespan_s)
                ratios = [run.makespan_s / base_s for run, base_s in zip(runs, first.values(), strict=True)]
                makespans = [run.makespan_s for run in runs]
                say(
                    f"| {name} | {scheduler} | {label} | {statistics.mean(makespans):.0f} "
                    f"| {statistics.mean(ratios):.3f} "
                )
                say(f"({min(ratios):.3f} to {max(ratios):.3f}) | {statistics.mean(run.tail_s for run in runs):.0f} |\n")
                sys.stdout.flush()


def two_epochs(name: str, seed: int) -> tuple[Workload, dict[str, int]]:
    """The workload of this epoch, and the longest response of each group in the earlier one."""
    spec, workload = PAPER[name], paper_workload(name, seed=seed)
    size = spec.group_size
    rows = spec.lengths.sample(spec.num_groups, 2 * size, seed)
    now = tuple(tuple(row[size:]) for row in rows)
    return replace(workload, lengths=now), {str(i): max(row[:size]) for i, row in enumerate(rows)}


def tokens(path: Path) -> None:
    groups = read_groups(path)
    say = sys.stdout.write
    say(f"\n{path.name}: {len(groups)} groups\n\n")
    say("| finished siblings | responses of the earlier epoch | tokens per step |\n|---|---|---|\n")
    for siblings in FINISHED_SIBLINGS:
        for past in PAST_RESPONSES:
            found = replay(groups, references=siblings + past, budget=BUDGET, options=DraftOptions())
            say(f"| {siblings} | {past} | {found.mean_accepted:.2f} |\n")


if __name__ == "__main__":
    main()
