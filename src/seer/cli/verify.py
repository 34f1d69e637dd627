# SPDX-License-Identifier: Apache-2.0
"""`seer verify RUN`: check that a run's responses are what its prompts, its weights and its seeds give.

All responses are checked against what was asked for (results_check.py), and a sample of them is scored again.
Exit code 0 if the verification is clean, 1 if not.
"""

from __future__ import annotations

import argparse
import json
import random
import sys
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

from seer.cli.number_option import NumberOption
from seer.errors import MissingExtra
from seer.ranges import Count, Seed, Share
from seer.ranges import check as check_range
from seer.runs.run_folder import RunFolder

if TYPE_CHECKING:
    from seer.verification.results_check import Finding, ResultsCheck
    from seer.verification.verify import Verification

EXAMPLES = """\
examples:
  seer verify runs/20260101-120000              16 responses, chosen by --seed
  seer verify runs/20260101-120000 --share 1    all of them
"""


def register(subparsers: argparse._SubParsersAction[Any]) -> None:
    """Add the verb."""
    parser = subparsers.add_parser(
        "verify",
        help="check a run's responses, and re-score some with a plain forward pass",
        description="Check every response of a run: each prompt and index is there once, seeds follow from the run's,\n"
        "ends and texts follow from the tokens, none failed. Then score a sample again with a plain fp32 forward\n"
        "pass: every token and log-probability must be what the weights give. The exit code is 1 if anything is wrong.",
        epilog=EXAMPLES,
    )
    parser.add_argument("run_folder", type=Path, metavar="RUN", help="folder of a run")
    parser.add_argument(
        "--sample", type=NumberOption(Count), default=16, metavar="N", help="responses to score (%(default)s)"
    )
    parser.add_argument(
        "--share", type=NumberOption(Share), metavar="P", help="share of the responses, instead of --sample"
    )
    parser.add_argument("--model", metavar="DIR", help="weights to score with (the run's own)")
    parser.add_argument(
        "--seed", type=NumberOption(Seed), default=0, metavar="S", help="seed that chooses the sample (%(default)s)"
    )
    parser.add_argument("--json", action="store_true", help="print the verification as JSON")
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    """Carry the verb out."""
    return verify(
        RunFolder.find(args.run_folder),
        num_sampled=args.sample,
        share=args.share,
        model=args.model,
        seed=args.seed,
        as_json=args.json,
    )


def verify(
    folder: RunFolder,
    *,
    num_sampled: int = 16,
    share: float | None = None,
    model: str | None = None,
    seed: int = 0,
    as_json: bool = False,
) -> int:
    """Verify a finished run and print the verdict; 0 if it is clean."""
    try:
        from seer.verification.recorded_run import check_recorded, read_recorded, score
    except ImportError as error:
        raise MissingExtra(error.name or "torch", "local") from None
    check_range(share, Share | None, "share")
    check_range(num_sampled, Count, "sample")
    recorded = read_recorded(folder, Path(model) if model is not None else None)
    check = check_recorded(recorded)
    num_sound = len(check.sound)
    wanted = max(1, round(num_sound * share)) if share is not None else num_sampled
    found = score(recorded, random.Random(seed).sample(check.sound, min(wanted, num_sound)))
    numbers = numbers_of(found, recorded.weights, check)
    folder.write_manifest(folder.read_manifest() | {"verification": numbers})
    if as_json:
        sys.stdout.write(json.dumps(numbers) + "\n")
    else:
        print_verification(numbers, check)
    return 0 if numbers["is_clean"] else 1


def numbers_of(found: Verification, weights: Path, check: ResultsCheck | None = None) -> dict[str, Any]:
    """A verification as run.json keeps it."""
    numbers = asdict(found) | {"is_clean": found.is_clean, "weights": str(weights)}
    if check is None:
        return numbers
    findings = [asdict(one) for one in check.ordered()]
    return numbers | {
        "is_clean": found.is_clean and not findings,
        "num_checked": check.num_responses,
        "findings": findings,
    }


def print_verification(numbers: dict[str, Any], check: ResultsCheck) -> None:
    """What was checked and scored and what was found, for people."""
    promise = "" if numbers["tokens_are_promised"] else " (not promised for this type)"
    lines = [
        ("weights", numbers["weights"]),
        ("responses checked", f"{check.num_responses:,}"),
        *(_finding_line(one) for one in check.ordered()),
        ("responses scored", f"{numbers['num_responses']} of {check.num_responses}"),
        ("tokens scored", f"{numbers['num_tokens']:,}"),
        *_compared_line(numbers),
        *_not_scored_lines(numbers),
        ("token mismatches", f"{numbers['num_mismatches']}{promise}"),
        ("near ties", f"{numbers['num_near_ties']}"),
        (
            "largest gap",
            f"{numbers['max_logprob_gap']:.2e} (logprob), {numbers['max_raw_logprob_gap']:.2e} (raw); "
            f"limit {numbers['gap_limit']:g}",
        ),
        ("verdict", "CLEAN" if numbers["is_clean"] else "NOT CLEAN"),
    ]
    sys.stdout.writelines(f"{name:<20} {value}\n" for name, value in lines)


def _compared_line(numbers: dict[str, Any]) -> list[tuple[str, str]]:
    """Only where not every sample can be repeated."""
    if numbers["num_compared"] == numbers["num_tokens"]:
        return []
    return [("tokens compared", f"{numbers['num_compared']:,}; the engine's noise is not known for the others")]


def _not_scored_lines(numbers: dict[str, Any]) -> list[tuple[str, str]]:
    """Only where responses have no log-probabilities."""
    lines = []
    if numbers["num_without_logprob"]:
        lines.append(("without log-prob.", f"{numbers['num_without_logprob']:,} tokens, as the run asked"))
    if numbers["num_unverified"]:
        why = "they cannot be repeated, or are not promised, and have no log-probability"
        lines.append(("tokens not verified", f"{numbers['num_unverified']:,}; {why}"))
    return lines


def _finding_line(finding: Finding) -> tuple[str, str]:
    from seer.verification.results_check import KINDS

    return KINDS[finding.kind], f"{finding.count:,}; the first: {' '.join(finding.first.split())}"
