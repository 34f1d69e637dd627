# SPDX-License-Identifier: Apache-2.0
"""Options of the commands that run real instances, and the configuration they make.

Layers, each over the one before: the defaults, `--preset`, `--config`, the options of the command line, `--set`.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable
from pathlib import Path
from typing import Any

from seer.cli.gpus_option import gpus_option
from seer.cli.size_option import size_option
from seer.config import PRESETS, RunConfig
from seer.config.engines import ENGINES
from seer.config.rollout import DTYPES, POOL_BACKENDS, SPECULATION_MODES

CONFIG_PREFIX = "config:"
"""Of the `dest` of an option that sets a key of the configuration."""


def add_prompt_options(parser: argparse.ArgumentParser) -> None:
    """Which prompts, how many responses, how they are sampled."""
    add = _adder(parser)
    add("--prompts", "prompts", type=Path, metavar="FILE.jsonl", help="prompts: text, chat messages or token ids")
    add("--n", "n", type=int, metavar="N", help="responses per prompt")
    add("--limit", "limit", type=int, metavar="N", help="use only the first N prompts (all)")
    add("--skip-bad", "skip_bad", const=True, help="list prompts that cannot run and go on without them")
    add("--seed", "seed", type=int, metavar="S", help="equal seeds give equal tokens")
    add("--run-dir", "run_dir", type=Path, metavar="DIR", help="folder of the run (runs/ and the time)")
    add = _adder(parser.add_argument_group("sampling"))
    add("--max-tokens", "sampling.max_tokens", type=int, metavar="N", help="longest response in tokens")
    add("--temperature", "sampling.temperature", type=float, metavar="X", help="sampling temperature; 0 is greedy")
    add("--top-p", "sampling.top_p", type=float, metavar="X", help="sample from the likeliest tokens of this mass")
    add("--top-k", "sampling.top_k", type=int, metavar="N", help="sample from the N likeliest tokens (all)")
    add("--min-p", "sampling.min_p", type=float, metavar="X", help="least probability, relative to the likeliest token")
    add("--min-tokens", "sampling.min_tokens", type=int, metavar="N", help="shortest response in tokens")
    add("--ignore-eos", "sampling.ignore_eos", const=True, help="go on to --max-tokens after the end token")


def add_rollout_options(parser: argparse.ArgumentParser) -> None:
    """Which model, on how many instances, with how much memory."""
    add = _adder(parser.add_argument_group("instances"))
    model = "a folder, a Hugging Face id (org/name), or a name of `seer model get`"
    add("--model", "rollout.model", metavar="MODEL", help=model)
    add("--engine", "rollout.engine", metavar="NAME", help=f"engine of the instances: {', '.join(ENGINES)}")
    add("--instances", "rollout.instances", type=int, metavar="N", help="number of instances, each a process")
    ray = "run the instances on the nodes of a Ray cluster: auto, or HOST:PORT of its head (this machine alone)"
    add("--ray", "rollout.hosting.ray", metavar="ADDRESS", help=ray)
    add("--device", "rollout.device", metavar="NAME", help="cpu, cuda or cuda:N (that GPU alone)")
    add("--gpus", "rollout.gpus", type=gpus_option, metavar="LIST", help="GPUs to use, as 0,1,4-7 (all visible ones)")
    add("--share-gpus", "rollout.share_gpus", const=True, help="put several instances on a GPU where there are too few")
    ranks = "GPUs of an instance, over which its model is spread (vllm)"
    add("--tensor-parallel", "rollout.tensor_parallel", type=int, metavar="N", help=ranks)
    experts = "instances in a row that share the experts of a model (vllm)"
    add("--data-parallel", "rollout.data_parallel", type=int, metavar="N", help=experts)
    add("--dtype", "rollout.dtype", metavar="NAME", help=f"type to compute in: {', '.join(DTYPES)}")
    seqs = "requests an instance runs at once (16 on a CPU, 256 on a GPU)"
    add("--max-num-seqs", "rollout.max_num_seqs", type=int, metavar="N", help=seqs)
    add("--max-model-len", "rollout.max_model_len", type=int, metavar="N", help="longest context (the model's own)")
    kv = "KV memory of each instance (1GiB on a CPU; on a GPU a share of what is free)"
    add("--kv-memory", "rollout.kv.memory_bytes", type=size_option, metavar="SIZE", help=kv)
    add("--pool", "rollout.pool.backend", choices=POOL_BACKENDS, help="where instances share KV")
    pool = "size of the local pool (twice the KV memory, at most half of what is free)"
    add("--pool-memory", "rollout.pool.memory_bytes", type=size_option, metavar="SIZE", help=pool)
    ssd = "folder for the pool's SSD tier, used while its DRAM is nearly full (none)"
    add("--pool-ssd", "rollout.pool.ssd_dir", type=Path, metavar="DIR", help=ssd)
    ssd = "size of the SSD tier (four times the pool's DRAM, at most half of what is free there)"
    add("--pool-ssd-bytes", "rollout.pool.ssd_bytes", type=size_option, metavar="SIZE", help=ssd)
    add("--pool-name", "rollout.pool.name", metavar="NAME", help="Mooncake store that `seer pool up` started")
    drafts = "grouped drafts: auto, where they pay, or off"
    add("--speculation", "rollout.speculation", choices=SPECULATION_MODES, help=drafts)
    chunk = "tokens a request may generate before it is placed anew (an eighth of the longest response)"
    add("--chunk-tokens", "rollout.chunk_tokens", type=int, metavar="N", help=chunk)
    add("--no-pin", "rollout.hosting.pin_cores", const=False, help="do not keep each CPU instance on one core")
    restarts = "restarts of an instance within an hour"
    add("--max-restarts", "rollout.hosting.max_restarts", type=int, metavar="N", help=restarts)


def add_config_options(parser: argparse.ArgumentParser) -> None:
    """Where the configuration comes from, and a look at it."""
    group = parser.add_argument_group("configuration")
    group.add_argument("--config", type=Path, metavar="FILE.toml", help="settings; options override the file")
    names = "; ".join(f"{name}: {one.about}" for name, one in PRESETS.items())
    group.add_argument("--preset", choices=tuple(PRESETS), help=f"start from a preset. {names}")
    group.add_argument(
        "--set",
        action="append",
        default=[],
        metavar="KEY=VALUE",
        help="set any key, as rollout.kv.blocks=512",
    )
    group.add_argument(
        "--dry-run", action="store_true", help="print the resolved configuration and the memory plan; start nothing"
    )


def add_key(
    group: argparse._ActionsContainer, flag: str, key: str, *, const: object = None, **settings: Any
) -> argparse.Action:
    """Add an option that sets `key` of the configuration; its help ends with the key's default."""
    default = _default(key)
    if const is not None:
        settings |= {"action": "store_const", "const": const}
    elif default is not None:
        settings["help"] += " (%(config_default)s)"
    action = group.add_argument(flag, dest=CONFIG_PREFIX + key, default=argparse.SUPPRESS, **settings)
    action.config_default = ",".join(default) if isinstance(default, tuple) else default  # type: ignore[attr-defined]
    return action


def names_of(text: str) -> tuple[str, ...]:
    """`a,b` as names."""
    return tuple(name.strip() for name in text.split(",") if name.strip())


def _adder(group: argparse._ActionsContainer) -> Callable[..., argparse.Action]:
    def add(flag: str, key: str, **settings: Any) -> argparse.Action:
        return add_key(group, flag, key, **settings)

    return add


def _default(key: str) -> Any:
    found: Any = RunConfig()
    for name in key.split("."):
        found = getattr(found, name)
    return found
