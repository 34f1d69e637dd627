# SPDX-License-Identifier: Apache-2.0
"""`seer drafts replay`: how many drafted tokens would recorded groups have accepted?

Prints the paper's Table 2 for a recording: references (finished siblings) down, paths across, accepted
tokens per step with the bonus token counted.
"""

import argparse
import json
import sys
from pathlib import Path

from rich.console import Console
from rich.table import Table

from seer.cli.number_option import NumberOption, number_list
from seer.drafting.index import DraftOptions
from seer.drafting.offline_replay import ReplayResult, replay
from seer.drafting.recording import read_groups
from seer.errors import InputError
from seer.ranges import CountOrZero, DraftTokens, Probability, Threads

EXAMPLES = """\
examples:
  seer drafts replay groups.npz
  seer drafts replay groups.npz --references 1,3,7 --paths 1,2 --budget 8
"""


def register(subparsers: "argparse._SubParsersAction[argparse.ArgumentParser]") -> None:
    """Add the verb `drafts` and its actions."""
    drafts = subparsers.add_parser("drafts", help="study grouped drafting on recorded groups")
    actions = drafts.add_subparsers(dest="action", required=True, metavar="ACTION")
    parser = actions.add_parser(
        "replay",
        help="replay recorded groups and print accepted tokens per step",
        description="Replay recorded groups: the last response of each is drafted from its first n siblings.\n"
        "Accepted tokens per step include the bonus token.",
        epilog=EXAMPLES,
    )
    parser.add_argument("file", type=Path, metavar="FILE.npz", help="recorded groups")
    parser.add_argument(
        "--references",
        default="0,1,5,15",
        metavar="N,...",
        help="finished siblings in the index (%(default)s)",
    )
    parser.add_argument(
        "--paths",
        default="1,2,4",
        metavar="K,...",
        help="children per fork: 1 is a linear draft, more a best-first tree (%(default)s)",
    )
    parser.add_argument(
        "--budget",
        type=NumberOption(DraftTokens),
        default=8,
        metavar="TOKENS",
        help="draft tokens per step (%(default)s)",
    )
    parser.add_argument(
        "--min-confidence",
        type=NumberOption(Probability),
        default=0.0,
        metavar="P",
        help="leave out less likely tokens",
    )
    parser.add_argument("--no-prompt", action="store_true", help="do not index the prompts of the recording")
    parser.add_argument("--json", action="store_true", help="print a list of results as JSON")
    parser.set_defaults(run=run_replay)


def run_replay(args: argparse.Namespace) -> int:
    """Replay every combination asked for and print it."""
    references = number_list(args.references, CountOrZero, "--references")
    paths = number_list(args.paths, Threads, "--paths")
    groups = read_groups(args.file)
    if not groups:
        raise InputError(f"{args.file} holds no groups")
    results = [
        replay(
            groups,
            references=n,
            budget=args.budget,
            options=DraftOptions(paths=k, min_confidence=args.min_confidence),
            use_prompt=not args.no_prompt,
        )
        for n in references
        for k in paths
    ]
    if args.json:
        json.dump([_row(result) for result in results], sys.stdout, indent=2)
        sys.stdout.write("\n")
    else:
        _print_table(args.file.name, len(groups), args.budget, results)
    return 0


def _row(result: ReplayResult) -> dict[str, int | float]:
    return {
        "references": result.references,
        "paths": result.paths,
        "budget": result.budget,
        "mean_accepted": round(result.mean_accepted, 4),
        "drafted_per_step": round(result.drafted_per_step, 4),
    }


def _print_table(name: str, num_groups: int, budget: int, results: list[ReplayResult]) -> None:
    table = Table(title=f"{name}: accepted tokens per step, {num_groups} groups, budget {budget} (drafted in brackets)")
    table.add_column("references", justify="right")
    paths = sorted({result.paths for result in results})
    for k in paths:
        table.add_column("linear" if k == 1 else f"{k} paths", justify="right")
    by_references: dict[int, dict[int, ReplayResult]] = {}
    for result in results:
        by_references.setdefault(result.references, {})[result.paths] = result
    for n, row in by_references.items():
        table.add_row(str(n), *(f"{row[k].mean_accepted:.2f} ({row[k].drafted_per_step:.1f})" for k in paths))
    Console().print(table)
