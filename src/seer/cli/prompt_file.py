# SPDX-License-Identifier: Apache-2.0
"""Read and check a prompts file for a command: all that is wrong with it, before anything is started."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from seer.config import RunConfig
from seer.errors import ConfigError, InputError
from seer.runs.encoded_check import refuse_too_many
from seer.runs.prompts import BadPrompt, EncodedPrompt, encode_for, read_prompts

if TYPE_CHECKING:
    from seer.engine.prepare import PreparedEngine


def load_prompts(config: RunConfig, engine: PreparedEngine) -> list[EncodedPrompt]:
    """The file's prompts as tokens. Bad ones are listed by line; without `skip_bad` they end the command."""
    path = config.prompts
    if path is None:
        raise ConfigError("there are no prompts", hint="--prompts FILE.jsonl, or `prompts` in the --config file")
    prompts, bad = read_prompts(path)
    encoded, unfit = encode_for(prompts, config, engine)
    report_bad([*bad, *unfit], path, skip_bad=config.skip_bad)
    if not encoded:
        raise InputError(f"{path} holds no prompt that can run")
    chosen = encoded[: config.limit]
    refuse_too_many(chosen)
    return chosen


def report_bad(bad: Sequence[BadPrompt], path: Path, *, skip_bad: bool) -> None:
    """Say what is wrong, a line each, in the file's order."""
    ordered = sorted(bad, key=lambda one: int(one.where.rpartition(" ")[2]))
    for one in ordered:
        sys.stderr.write(f"{path}, {one}\n")
    if bad and not skip_bad:
        raise InputError(f"{len(bad)} bad prompts in {path}", hint="--skip-bad goes on without them")
    if bad:
        sys.stderr.write(f"going on without {len(bad)} bad prompts\n")
