# SPDX-License-Identifier: Apache-2.0
"""`seer profile`: measure what a step of the local engine costs, for people and for the start of the next rollout."""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

from seer.cli.number_option import NumberOption, number_list
from seer.cli.output_file import refuse_output, write_output
from seer.errors import MissingExtra
from seer.ranges import Repeats, SequenceSlots

THREADS = 1
"""Of the engine on a CPU, the default of a rollout's instances."""


def register(subparsers: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Add `seer profile`."""
    parser = subparsers.add_parser(
        "profile",
        help="measure step costs of the local engine by batch size, tokens per request and context",
        description="Measure the local engine's step time by batch size, tokens per request and context, and keep\n"
        "it as JSON. Rollouts of this model on this device start with it: their first steps draft by measured costs.\n"
        "They go on with what they measure themselves. Another version of Seer or torch needs a new profile.",
        epilog="examples:\n  seer profile smollm2\n  seer profile DIR --device cuda --batches 16,64,256",
    )
    parser.add_argument("model", metavar="MODEL", help="a folder, a Hugging Face id or a name")
    parser.add_argument("--batches", metavar="N,...", default="1,4,16,32", help="requests per step (%(default)s)")
    parser.add_argument(
        "--tokens", metavar="N,...", default="1,2,5,9", help="tokens per request: 1 is plain decoding (%(default)s)"
    )
    parser.add_argument(
        "--contexts", metavar="N,...", default="128,1024", help="context lengths in tokens (%(default)s)"
    )
    parser.add_argument(
        "--steps", metavar="N", type=NumberOption(Repeats), default=10, help="steps per shape (%(default)s)"
    )
    parser.add_argument("--device", metavar="NAME", default="cpu", help="cpu or cuda (%(default)s)")
    parser.add_argument(
        "--dtype", metavar="NAME", default="auto", help="auto, float32, bfloat16 or float16 (%(default)s)"
    )
    parser.add_argument(
        "--out", metavar="FILE.json", type=Path, help="the file (one in the user's cache, where rollouts find it)"
    )
    parser.add_argument("--force", action="store_true", help="replace a file that is at --out")
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    """Measure, print a table, write the file."""
    asked = {"--batches": args.batches, "--tokens": args.tokens, "--contexts": args.contexts}
    shapes = {option: sorted({*number_list(text, SequenceSlots, option)}) for option, text in asked.items()}
    if args.out is not None:
        refuse_output(args.out, option="--out", force=args.force)
    try:
        import torch

        from seer.engine.local.bench import profile
        from seer.engine.local.models_get import find_model
        from seer.engine.profiles import local_key
    except ModuleNotFoundError as error:
        raise MissingExtra(error.name or "torch", "local") from None
    torch.set_num_threads(THREADS)
    folder = find_model(args.model)
    measured = profile(
        folder,
        batches=shapes["--batches"],
        tokens_per_request=shapes["--tokens"],
        contexts=shapes["--contexts"],
        num_steps=args.steps,
        device=args.device,
        dtype=args.dtype,
    )
    out = args.out or local_key(folder, device=args.device, dtype=measured.dtype, threads=THREADS).path
    if args.out is None:
        out.parent.mkdir(parents=True, exist_ok=True)  # in the user's cache
        measured.save(out)
    else:
        write_output(out, measured.encode(), option="--out")
    sys.stdout.write("requests  tokens/request  context   step ms   (quartiles apart)\n")
    for point in measured.points:
        sys.stdout.write(
            f"{point.num_requests:8d}  {point.tokens_per_request:14d}  {point.context_tokens:7d}  "
            f"{point.step_s * 1e3:8.2f}   {point.spread_s * 1e3:.2f}\n"
        )
    sys.stdout.write(f"written to {out}\n")
    return 0
