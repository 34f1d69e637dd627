# SPDX-License-Identifier: Apache-2.0
"""`--resume RUN`: the configuration of a run that was interrupted, from its folder.

Rules
  1. A run is resumed in its own folder, over the prompts that were copied there. Its instances write their logs there.
  2. run.json names no file outside of that folder that is written to. Results that went to another place are written
     there again only if `--out` repeats it: the folder may come from somebody else.
  3. For the same reason no code is run that run.json names: `--environment` is repeated.
  4. An option that is given holds for what is left, as `--ray` with the address of another cluster. One that would
     change the tokens of the run is refused, by the journal's identity at the latest.
"""

from __future__ import annotations

import argparse
import shlex
from dataclasses import replace
from pathlib import Path

from seer.cli.rollout_options import CONFIG_PREFIX
from seer.cli.run_config import read_run
from seer.config import RunConfig, build_run
from seer.errors import InputError
from seer.runs.run_folder import RunFolder

NOT_WITH_RESUME = {"preset": "--preset", f"{CONFIG_PREFIX}prompts": "--prompts", f"{CONFIG_PREFIX}run_dir": "--run-dir"}
"""Options of a new run."""


def read_resumed(path: Path, args: argparse.Namespace) -> RunConfig:
    """The configuration of the run in a folder, with the options of this command line."""
    out, environment = (getattr(args, f"{CONFIG_PREFIX}{name}", None) for name in ("out", "environment"))
    folder = RunFolder.find(path)
    for name, option in NOT_WITH_RESUME.items():
        if getattr(args, name, None) is not None:
            raise InputError(f"--resume goes on with the {option} of {folder.path}", hint=f"leave {option} out")
    manifest = folder.read_facts()
    if manifest.config is None or manifest.command != "rollout":
        raise InputError(f"{folder.manifest} holds no configuration", hint="only `seer rollout` can be resumed")
    config = build_run(manifest.config, source=str(folder.manifest))
    recorded = config.out or folder.results
    if out is None and not _is_inside(recorded, folder):
        raise InputError(
            f"the results of {folder.path} go to another folder: {str(recorded.resolve())!r}",
            hint="repeat --out with the file that is meant",
        )
    if config.environment != environment:
        hint = f"repeat --environment {config.environment}" if config.environment else "leave --environment out"
        raise InputError(f"the run in {folder.path} had the environment {config.environment!r}", hint=hint)
    hosting = replace(config.rollout.hosting, log_dir=None)  # None: the run's folder
    config = read_run(args, base=replace(config, rollout=replace(config.rollout, hosting=hosting)))
    return replace(config, run_dir=folder.path, prompts=folder.prompts)


def resume_command(folder: RunFolder, out: Path, environment: str | None = None) -> str:
    """What continues a run."""
    words = ["seer", "rollout", "--resume", str(folder.path)]
    words += [] if environment is None else ["--environment", environment]
    return shlex.join(words if _is_inside(out, folder) else [*words, "--out", str(out)])


def _is_inside(path: Path, folder: RunFolder) -> bool:
    return path.resolve().is_relative_to(folder.path.resolve())
