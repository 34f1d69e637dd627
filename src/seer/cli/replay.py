# SPDX-License-Identifier: Apache-2.0
"""`seer replay`: run a recorded rollout again, and say whether the plan is the same."""

from __future__ import annotations

import argparse
import sys
from collections import Counter
from pathlib import Path
from typing import TYPE_CHECKING, Any

from seer.sim.replay import read_recording, replay

if TYPE_CHECKING:
    from seer.analysis.whatif import RecordedRun

EXAMPLES = """\
examples:
  seer simulate qwen2-vl-72b --schedulers seer --out runs/q    record a simulation
  seer replay runs/q/seer/events.jsonl                         the same plan again, or exit code 1
  seer replay runs/q/seer/events.jsonl --scheduler verl        the same lengths under another scheduler
  seer replay runs/20260101-120000                             a real run's lengths under other schedulers
"""


def register(subparsers: argparse._SubParsersAction[Any]) -> None:
    """Add the verb."""
    parser = subparsers.add_parser(
        "replay",
        help="run a recorded rollout again in virtual time",
        description="Run a recorded rollout again in virtual time: the same lengths on the same cluster.\n"
        "Under the recorded scheduler the plan must be the same, chunk for chunk.",
        epilog=EXAMPLES,
    )
    parser.add_argument(
        "events", type=Path, metavar="RUN|EVENTS.jsonl", help="a run's folder, or a simulation's event log"
    )
    parser.add_argument("--scheduler", metavar="NAME", help="use this scheduler (the recorded one)")
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    """Replay, and compare the plans chunk by chunk."""
    if args.events.is_dir():
        return _what_if(args)
    recording = read_recording(args.events)
    plan = replay(recording, args.scheduler)
    scheduler = args.scheduler or recording.scheduler
    say = sys.stdout.write
    workload = recording.workload
    say(f"{workload.name}: {workload.num_requests:,} requests, {len(plan):,} chunks under {scheduler}\n")
    if scheduler != recording.scheduler:
        say(f"recorded: {len(recording.started):,} chunks under {recording.scheduler}\n")
        return 0
    for number, (old, new) in enumerate(zip(recording.started, plan, strict=False)):
        if old != new:
            say(f"the plan differs from chunk {number} on:\n  recorded {old}\n  replayed {new}\n")
            return 1
    if len(plan) != len(recording.started):
        say(f"the plan differs: {len(recording.started):,} chunks were recorded\n")
        return 1
    say("the plan is the same, chunk for chunk\n")
    return 0


WHAT_IF = ("verl-sync", "verl", "context", "seer", "oracle")


def _what_if(args: argparse.Namespace) -> int:
    """A real run's lengths under other schedulers, at the step cost that was measured in it."""
    from seer.analysis.whatif import read_recorded, replay_all
    from seer.runs.run_folder import RunFolder

    recorded = read_recorded(RunFolder.find(args.events))
    predicted = replay_all(recorded, [args.scheduler] if args.scheduler else WHAT_IF)
    say = sys.stdout.write
    say(f"{len(recorded.groups)} groups, {sum(map(len, recorded.lengths))} responses; ")
    say(f"{_step_costs(recorded)}\n")
    say(f"measured under {recorded.scheduler}: {recorded.makespan_s:.1f} s\n")
    say(f"{'scheduler':<12} {'predicted s':>12} {'saved':>7} {'tail s':>7} {'idle':>6}\n")
    same = predicted[recorded.scheduler].makespan_s
    for scheduler, summary in predicted.items():
        saved = 100 * (1 - summary.makespan_s / same)
        say(f"{scheduler:<12} {summary.makespan_s:>12.1f} {saved:>6.0f}% {summary.tail_s:>7.1f} ")
        say(f"{100 * summary.idle_share:>5.0f}%\n")
    error = 100 * (same / recorded.makespan_s - 1)
    drafts = "drafts as recorded" if recorded.gains else "drafts are left out: none were recorded"
    say(f"the prediction for {recorded.scheduler} is {error:+.0f}% off what was measured; {drafts}\n")
    return 0


def _step_costs(recorded: RecordedRun) -> str:
    """Of all instances; of each kind where they differ."""
    kinds = Counter(recorded.limits)
    costs = []
    for one, count in kinds.items():
        fit = recorded.fit_of(one)
        cost = f"a step of B rows took {1000 * fit.base_s:.1f} + {1000 * fit.slope_s:.2f} B ms"
        where = (
            f" on {count} of {kinds.total()} instances ({one.max_num_seqs} requests, {one.kv_tokens:,} tokens of KV)"
        )
        costs.append(cost + where if len(kinds) > 1 else cost)
    return "; ".join(costs)
