# SPDX-License-Identifier: Apache-2.0
"""From a parsed command line to the configuration of a run, and into the run's folder."""

from __future__ import annotations

import argparse
import tomllib
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

from seer.cli.rollout_options import CONFIG_PREFIX
from seer.config import RunConfig, build_run, plain_values, preset, read_config_file
from seer.errors import ConfigError
from seer.runs.run_folder import RunFolder


def read_run(args: argparse.Namespace, base: RunConfig | None = None) -> RunConfig:
    """The configuration that a command line asks for, in place of what the base says otherwise."""
    config = preset(args.preset) if args.preset is not None else base or RunConfig()
    if args.config is not None:
        config = read_config_file(args.config, base=config)
    overrides: dict[str, Any] = {}
    for dest, value in vars(args).items():
        if dest.startswith(CONFIG_PREFIX):
            _put(overrides, dest.removeprefix(CONFIG_PREFIX), value)
    config = build_run(overrides, base=config)
    settings: dict[str, Any] = {}
    for word in args.set:
        key, _, text = word.partition("=")
        _put(settings, key.strip(), _toml_value(text.strip(), word))
    return build_run(settings, base=config, source="--set")


def _with_folder(config: RunConfig, folder: Path) -> RunConfig:
    """The same, kept in this folder; the instances' logs go there too unless a folder is set for them."""
    hosting = config.rollout.hosting
    hosting = replace(hosting, log_dir=hosting.log_dir or folder)
    return replace(config, run_dir=folder, rollout=replace(config.rollout, hosting=hosting))


def carry_out(config: RunConfig, args: argparse.Namespace, work: Callable[[RunFolder, RunConfig], int]) -> int:
    """Print the dry run if that is asked for; otherwise work in the run's folder, locked against other drivers."""
    if args.dry_run:
        from seer.cli.dry_run import print_dry_run

        print_dry_run(config, as_json=args.json)
        return 0
    folder = RunFolder.choose(config.run_dir)
    with folder.held():
        return work(folder, _with_folder(config, folder.path))


def recorded(config: RunConfig) -> dict[str, Any]:
    """For run.json: the whole configuration, and the facts that reports show."""
    rollout = config.rollout
    options = {
        "model": rollout.model,
        "engine": rollout.engine,
        "instances": rollout.instances,
        "scheduler": rollout.scheduler,
        "speculation": rollout.speculation,
        "pool": rollout.pool.backend,
        "chunk_tokens": rollout.chunk_tokens,
        "dtype": rollout.dtype,
        "device": rollout.device,
        "n": config.n,
        "max_tokens": config.sampling.max_tokens,
        "seed": config.seed,
    }
    return {"options": options, "config": plain_values(config)}


def _put(values: dict[str, Any], key: str, value: Any) -> None:
    *sections, name = key.split(".")
    for section in sections:
        values = values.setdefault(section, {})
        if not isinstance(values, dict):
            raise ConfigError(f"--set {key}: {section} is no section")
    values[name] = value


def _toml_value(text: str, word: str) -> Any:
    """A value as TOML writes it; a word without quotes is a string."""
    if not text:
        raise ConfigError(f"--set {word} has no value", hint="--set rollout.kv.blocks=512")
    try:
        parsed = tomllib.loads(f"value = {text}")
    except tomllib.TOMLDecodeError:
        return text
    except (ValueError, RecursionError) as error:  # a number of thousands of digits, or brackets without end
        raise ConfigError(f"--set {word[:60]}: {error}") from None
    if len(parsed) > 1:
        raise ConfigError(f"--set {word[:60]!r} has more than one value", hint="repeat --set for each")
    return parsed["value"]
