# SPDX-License-Identifier: Apache-2.0
"""`seer report RUN`: what happened in a run, as one HTML page and a Perfetto trace."""

from __future__ import annotations

import argparse
import sys
from pathlib import Path
from typing import Any

from seer.cli.output_file import refuse_output, write_output
from seer.machine.whole_files import write_whole
from seer.runs.run_folder import RunFolder

EXAMPLES = """\
examples:
  seer report runs/20260101-120000
  seer report runs/20260101-120000 --out page.html
"""


def register(subparsers: argparse._SubParsersAction[Any]) -> None:
    """Add the verb."""
    parser = subparsers.add_parser(
        "report",
        help="explain a run in an HTML page and a Perfetto trace",
        description="Explain a run from its event log: a self-contained HTML page (timeline, KV use, tail,\n"
        "drafts, where the time went, the oracle estimate) and a trace for ui.perfetto.dev.",
        epilog=EXAMPLES,
    )
    parser.add_argument(
        "run_folder", type=Path, metavar="RUN", help="a folder of `seer rollout`, `seer compare` or a trainer"
    )
    parser.add_argument("--out", type=Path, metavar="FILE.html", help="the page (report.html in the run's folder)")
    parser.add_argument("--force", action="store_true", help="replace a file that is at --out")
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    """Carry the verb out."""
    from seer.metrics.jsonl import read_events
    from seer.metrics.perfetto import write_trace
    from seer.report.page import page_text

    folder = RunFolder.find(args.run_folder)
    if args.out is not None:
        refuse_output(args.out, option="--out", force=args.force, never=folder.written)
    manifest = folder.read_facts()
    others: list[RunFolder] = []
    shown, training = folder, ""
    if manifest.command == "train":
        from seer.report.training import newest_step, read_training, training_section

        training = training_section(read_training(folder))
        shown = newest_step(folder)
    if manifest.command == "compare":
        *others, shown = [RunFolder.find(folder.path / f"{name}-0") for name in manifest.schedulers()]
    page = page_text(shown, rows=manifest.rows, others=others, training=training).encode()
    if args.out is None:
        write_whole(folder.report, page)
    else:
        write_output(args.out, page, option="--out")
    write_trace(read_events(shown.events, allow_cut=True), folder.trace)
    sys.stdout.write(f"page     {args.out or folder.report}\ntrace    {folder.trace} (open it in ui.perfetto.dev)\n")
    return 0
