"""Options that every command with real instances shares, and what they become."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

from seer.cli.size_option import size_option
from seer.errors import ConfigError
from seer.types import Sampling


def add_prompt_options(parser: argparse.ArgumentParser, *, required: bool = True) -> None:
    """Which prompts, how many responses, how they are sampled."""
    parser.add_argument(
        "--prompts",
        type=Path,
        required=required,
        metavar="FILE.jsonl",
        help="text, chat messages or token ids",
    )
    parser.add_argument("--n", type=int, default=8, metavar="N", help="responses per prompt (%(default)s)")
    parser.add_argument("--limit", type=int, metavar="N", help="only the first N prompts")
    parser.add_argument("--skip-bad", action="store_true", help="go on without prompts that cannot run, and list them")
    sampling = parser.add_argument_group("sampling")
    sampling.add_argument("--max-tokens", type=int, default=256, metavar="N", help="longest response (%(default)s)")
    sampling.add_argument("--temperature", type=float, default=1.0, metavar="X", help="0 is greedy (%(default)s)")
    sampling.add_argument("--top-p", type=float, default=1.0, metavar="X", help="(%(default)s)")
    sampling.add_argument("--top-k", type=int, metavar="N", help="(off)")
    sampling.add_argument("--min-p", type=float, default=0.0, metavar="X", help="(%(default)s)")
    sampling.add_argument("--min-tokens", type=int, default=0, metavar="N", help="(%(default)s)")
    sampling.add_argument("--ignore-eos", action="store_true", help="go on to max-tokens")
    sampling.add_argument("--seed", type=int, default=0, metavar="S", help="(%(default)s)")


def add_fleet_options(parser: argparse.ArgumentParser) -> None:
    """Which model, on how many instances, with how much memory."""
    fleet = parser.add_argument_group("instances")
    fleet.add_argument(
        "--model", default="smollm2", metavar="DIR|NAME", help="a model folder, or smollm2 (%(default)s)"
    )
    fleet.add_argument("--engine", default="local", metavar="NAME", help="local or vllm (%(default)s)")
    fleet.add_argument("--instances", type=int, default=2, metavar="N", help="(%(default)s)")
    fleet.add_argument("--pool", choices=("local", "mooncake", "none"), default="local", help="shared KV (%(default)s)")
    fleet.add_argument(
        "--pool-name", default="default", metavar="NAME", help="of the pool that `seer pool up` started (mooncake)"
    )
    fleet.add_argument(
        "--speculation", choices=("auto", "off"), default="auto", help="auto: where it pays (%(default)s)"
    )
    fleet.add_argument("--chunk-tokens", type=int, metavar="N", help="(an eighth of --max-tokens)")
    fleet.add_argument("--max-num-seqs", type=int, default=16, metavar="N", help="requests at once (%(default)s)")
    fleet.add_argument("--kv-memory", type=size_option, metavar="SIZE", help="KV memory of each instance (1GiB on CPU)")
    fleet.add_argument(
        "--pool-memory", type=size_option, metavar="SIZE", help="shared memory for KV (twice the instances')"
    )
    fleet.add_argument("--device", default="cpu", help="cpu or cuda (%(default)s)")
    fleet.add_argument("--dtype", default="auto", help="auto, float32, bfloat16 or float16 (%(default)s)")
    fleet.add_argument("--no-pin", action="store_true", help="do not keep each instance on one core")
    fleet.add_argument("--max-restarts", type=int, default=3, metavar="N", help="of a lost instance (%(default)s)")


def sampling_of(args: argparse.Namespace) -> Sampling:
    """The run's sampling."""
    return Sampling(
        max_tokens=args.max_tokens,
        temperature=args.temperature,
        top_p=args.top_p,
        top_k=args.top_k,
        min_p=args.min_p,
        min_tokens=args.min_tokens,
        ignore_eos=args.ignore_eos,
    )


def fleet_settings(args: argparse.Namespace, log_dir: Path | None) -> dict[str, Any]:
    """Keyword arguments of `Rollout`, the model apart."""
    from seer.hosting import hosting_for

    if args.n < 1:
        raise ConfigError(f"--n {args.n}", hint="at least 1")
    return {
        "engine": args.engine,
        "instances": args.instances,
        "pool": args.pool,
        "speculation": args.speculation,
        "chunk_tokens": args.chunk_tokens,
        "max_num_seqs": args.max_num_seqs,
        "kv_memory_bytes": args.kv_memory,
        "pool_bytes": args.pool_memory,
        "pool_name": args.pool_name,
        "device": args.device,
        "dtype": args.dtype,
        "hosting": hosting_for(args.device, pin=not args.no_pin, max_restarts=args.max_restarts, log_dir=log_dir),
    }


def recorded_options(args: argparse.Namespace) -> dict[str, Any]:
    """The arguments as plain values, for run.json."""
    skipped = ("run", "verb", "json", "quiet", "resume", "debug")
    return {
        key: str(value) if isinstance(value, Path) else value for key, value in vars(args).items() if key not in skipped
    }
