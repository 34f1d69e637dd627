# SPDX-License-Identifier: Apache-2.0
"""`seer report RUN`: what happened in a run, as one HTML page and a Perfetto trace."""

from __future__ import annotations

import argparse
import sys
from pathlib import Path
from typing import Any

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
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    """Carry the verb out."""
    from seer.metrics.jsonl import read_events
    from seer.metrics.perfetto import write_trace
    from seer.report.page import write_page

    folder = RunFolder.find(args.run_folder)
    manifest = folder.read_manifest()
    rows: list[dict[str, Any]] = []
    others: list[RunFolder] = []
    shown, training = folder, ""
    if manifest["command"] == "train":
        from seer.report.training import newest_step, read_training, training_section

        training = training_section(read_training(folder))
        shown = newest_step(folder)
    if manifest["command"] == "compare":
        rows = manifest["rows"]
        *others, shown = [RunFolder.find(folder.path / f"{row['scheduler']}-0") for row in rows]
    page = write_page(shown, args.out or folder.report, rows=rows, others=others, training=training)
    write_trace(read_events(shown.events), folder.trace)
    sys.stdout.write(f"page     {page}\ntrace    {folder.trace} (open it in ui.perfetto.dev)\n")
    return 0
