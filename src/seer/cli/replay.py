"""`seer replay`: run a recorded rollout again, and say whether the plan is the same."""

from __future__ import annotations

import argparse
import sys
from pathlib import Path
from typing import Any

from seer.sim.replay import read_recording, replay

EXAMPLES = """\
examples:
  seer simulate qwen2-vl-72b --policies seer --out runs/q     record
  seer replay runs/q/seer/events.jsonl                        the same plan again, or exit code 1
  seer replay runs/q/seer/events.jsonl --policy verl          the same lengths under another policy
"""


def register(subparsers: argparse._SubParsersAction[Any]) -> None:
    """Add the verb."""
    parser = subparsers.add_parser(
        "replay",
        help="run a recorded rollout again from its event log",
        description="Run a recorded rollout again in virtual time: the same lengths on the same cluster.\n"
        "Under the recorded policy the plan must be the same, chunk for chunk.",
        epilog=EXAMPLES,
    )
    parser.add_argument("events", type=Path, metavar="EVENTS.jsonl", help="an event log, as --out writes it")
    parser.add_argument("--policy", metavar="NAME", help="another policy than the recorded one")
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    """Replay, and compare the plans chunk by chunk."""
    recording = read_recording(args.events)
    plan = replay(recording, args.policy)
    policy = args.policy or recording.policy
    say = sys.stdout.write
    workload = recording.workload
    say(f"{workload.name}: {workload.num_requests:,} requests, {len(plan):,} chunks under {policy}\n")
    if policy != recording.policy:
        say(f"recorded: {len(recording.started):,} chunks under {recording.policy}\n")
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
