# SPDX-License-Identifier: Apache-2.0
"""`seer verify RUN`: check that a run's responses are what its weights and seeds give.

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
from seer.config import RolloutConfig, RunConfig, build_run
from seer.errors import InputError, MissingExtra
from seer.ranges import Count, Seed, Share, check
from seer.runs.run_folder import RunFolder

if TYPE_CHECKING:
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
        help="re-score a run's responses with a plain forward pass",
        description="Score a sample of a run's responses again with a plain fp32 forward pass. Every token and\n"
        "log-probability must be what the weights give; exit code 1 if one is not.",
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
        from seer.verification.verify import PlainModel, engine_dtype
        from seer.verification.verify import verify as verify_responses
    except ImportError as error:
        raise MissingExtra(error.name or "torch", "local") from None
    check(share, Share | None, "share")
    check(num_sampled, Count, "sample")
    manifest = folder.read_manifest()
    if "config" not in manifest:
        raise InputError(f"{folder.manifest} holds no configuration", hint="verify a folder of `seer rollout`")
    config = build_run(manifest["config"], source=str(folder.manifest))
    if config.rollout.engine != "local":
        raise InputError(f"{folder.path} was not run on the local engine", hint="only the local engine can be verified")
    responses = _responses(folder, manifest, config)
    if not responses:
        raise InputError(f"{folder.path} holds no response with tokens")
    wanted = max(1, round(len(responses) * share)) if share is not None else min(num_sampled, len(responses))
    chosen = random.Random(seed).sample(responses, wanted)
    weights = Path(model or manifest["model_dir"])
    dtype = engine_dtype(config.rollout.dtype, config.rollout.device)
    found = verify_responses(PlainModel(weights), chosen, dtype=dtype)
    numbers = numbers_of(found, weights)
    folder.write_manifest(manifest | {"verification": numbers})
    if as_json:
        sys.stdout.write(json.dumps(numbers) + "\n")
    else:
        print_verification(numbers, len(responses))
    return 0 if found.is_clean else 1


def numbers_of(found: Verification, weights: Path) -> dict[str, Any]:
    """A verification as run.json keeps it."""
    return asdict(found) | {"is_clean": found.is_clean, "weights": str(weights)}


def _responses(folder: RunFolder, manifest: dict[str, Any], config: RunConfig) -> list[Any]:
    """Every response of the run beside the prompt and the sampling it was asked with."""
    from seer.engine.prepare import prepare
    from seer.runs.prompts import encode, read_prompts
    from seer.runs.results import read_responses
    from seer.verification.verify import ResponseToVerify

    engine = prepare(RolloutConfig(model=manifest["model_dir"]))
    prompts, _ = read_prompts(folder.prompts)
    encoded, _ = encode(
        prompts,
        engine.codec,
        n=config.n,
        sampling=config.sampling,
        max_model_len=engine.max_model_len,
    )
    by_id = {prompt.prompt.id: prompt for prompt in encoded}
    results = config.out or folder.results
    forced = bool(manifest.get("forced_lengths"))
    responses = []
    for response in read_responses(results):
        prompt = by_id.get(response.prompt_id)
        if prompt is None:
            raise InputError(f"{results}: prompt {response.prompt_id!r} is not in {folder.prompts}")
        if response.token_ids:
            responses.append(ResponseToVerify(prompt.token_ids, prompt.sampling, response, ends_ignored=forced))
    return responses


def print_verification(numbers: dict[str, Any], num_responses: int) -> None:
    """What was scored and what was found, for people."""
    verdict = "CLEAN" if numbers["is_clean"] else "NOT CLEAN"
    promise = "" if numbers["tokens_are_promised"] else " (not promised for this type)"
    sys.stdout.write(
        f"weights            {numbers['weights']}\n"
        f"responses scored   {numbers['num_responses']} of {num_responses}\n"
        f"tokens scored      {numbers['num_tokens']:,}\n"
        f"token mismatches   {numbers['num_mismatches']}{promise}\n"
        f"near ties          {numbers['num_near_ties']}\n"
        f"largest gap        {numbers['max_logprob_gap']:.2e} (logprob), "
        f"{numbers['max_raw_logprob_gap']:.2e} (raw); limit {numbers['gap_limit']:g}\n"
        f"verdict            {verdict}\n"
    )
