# SPDX-License-Identifier: Apache-2.0
"""What a request that stays pays for the extensions of its lease, from the events of runs.

    python benchmarks/rollout/gaps.py FOLDER ...

A folder is the --out of gpu.py or cpu.py (its events-*.jsonl), or a run's folder of `seer rollout`. An extension that
comes in time has no gap: its request goes on decoding. One that comes too late has the time until its request decodes
again. Printed beside the gaps is the mean step of the run: the goal is a 99th percentile of at most one step.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from seer.analysis.leases import report_leases
from seer.metrics.events import Event, Stepped
from seer.metrics.jsonl import read_events, read_header
from seer.runs.run_folder import RunFolder
from stamp import print_stamp


def runs_of(folder: Path) -> Iterator[tuple[str, list[Event], int]]:
    """Name, events and KV tokens of an instance, of every run in a folder."""
    logs = sorted(folder.glob("events-*.jsonl"))
    for path in logs:
        yield f"{folder.name}/{path.stem}", list(read_events(path)), read_header(path).metadata["kv_tokens"]
    if not logs:
        run = RunFolder(folder)
        limits = run.read_facts().limits
        assert limits is not None, f"{folder} ended before its instances had started"
        yield folder.name, list(read_events(run.events)), limits.as_limits().kv_tokens


def mean_step_s(events: Sequence[Event]) -> float:
    """Of all steps without prompt tokens."""
    steps = [event for event in events if isinstance(event, Stepped) and not event.num_prefill_tokens]
    return sum(step.duration_s for step in steps) / max(1, sum(step.num_steps for step in steps))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folders", type=Path, nargs="+")
    args = parser.parse_args()
    print_stamp(args)
    print("| run | chunks | extensions | late | p99 gap, ms | step, ms | parked | KV in use while any waits |")
    print("|---|---|---|---|---|---|---|---|")
    for folder in args.folders:
        for name, events, kv_tokens in runs_of(folder):
            found = report_leases(events, kv_tokens=kv_tokens)
            use = f"{found.kv_use:.0%}" if found.kv_use is not None else "-"
            print(
                f"| {name} | {found.num_chunks} | {found.num_extended} | {found.num_late} | "
                f"{1e3 * found.p99_gap_s:.1f} | {1e3 * mean_step_s(events):.1f} | {found.num_parked} | {use} |",
                flush=True,
            )


if __name__ == "__main__":
    main()
