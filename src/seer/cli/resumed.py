# SPDX-License-Identifier: Apache-2.0
"""`--resume RUN`: the configuration of a run that was interrupted, from its folder.

Rules
  1. A run is resumed in its own folder, over the prompts that were copied there. Its instances write their logs there.
  2. run.json names no file outside of that folder that is written to. Results that went to another place are written
     there again only if `--out` repeats it: the folder may come from somebody else.
  3. For the same reason no code is run that run.json names: `--environment` is repeated.
"""

from __future__ import annotations

import shlex
from dataclasses import replace
from pathlib import Path

from seer.config import RunConfig, build_run
from seer.errors import InputError
from seer.runs.run_folder import RunFolder


def read_resumed(path: Path, out: Path | None, environment: str | None = None) -> RunConfig:
    """The configuration of the run in a folder; `out` and `environment` are what the command line says."""
    folder = RunFolder.find(path)
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
    return replace(
        config,
        run_dir=folder.path,
        prompts=folder.prompts,
        out=out or config.out,
        rollout=replace(config.rollout, hosting=hosting),
    )


def resume_command(folder: RunFolder, out: Path, environment: str | None = None) -> str:
    """What continues a run."""
    words = ["seer", "rollout", "--resume", str(folder.path)]
    words += [] if environment is None else ["--environment", environment]
    return shlex.join(words if _is_inside(out, folder) else [*words, "--out", str(out)])


def _is_inside(path: Path, folder: RunFolder) -> bool:
    return path.resolve().is_relative_to(folder.path.resolve())
