# SPDX-License-Identifier: Apache-2.0
"""Configurations as TOML, and as the plain values that cross a process boundary."""

from __future__ import annotations

import tomllib
from pathlib import Path
from typing import Any

import msgspec
import tomli_w

from seer.config.build import build_run
from seer.config.run import RunConfig
from seer.errors import InputError
from seer.machine.given_files import SETTINGS_BYTES, read_given


def read_config_file(path: Path, *, base: RunConfig | None = None) -> RunConfig:
    """The run that a TOML file describes; what it leaves out comes from `base`, or is the default."""
    try:
        values = tomllib.loads(read_given(path, limit_bytes=SETTINGS_BYTES).decode())
    except OSError as error:
        raise InputError(f"{path} cannot be read: {error.strerror}") from None
    except (ValueError, RecursionError) as error:  # not TOML, not UTF-8, or a number of thousands of digits
        raise InputError(f"{path} is not TOML: {error}") from None
    return build_run(values, base=base, source=str(path))


def to_toml(config: Any) -> str:
    """A configuration as TOML. Fields that are None are left out: TOML has no null, and None is their default."""
    return tomli_w.dumps(without_nulls(plain_values(config)))


def plain_values(config: Any) -> Any:
    """Numbers, strings, lists and dictionaries; `build` makes the same object of them again."""
    return msgspec.to_builtins(config, enc_hook=str)  # paths are all that msgspec does not know


def without_nulls(values: dict[str, Any]) -> dict[str, Any]:
    """The same without keys whose value is None, at every depth."""
    return {
        key: without_nulls(value) if isinstance(value, dict) else value
        for key, value in values.items()
        if value is not None
    }
