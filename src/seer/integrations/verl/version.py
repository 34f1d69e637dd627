# SPDX-License-Identifier: Apache-2.0
"""Which verl is installed, and whether this adapter supports it."""

from __future__ import annotations

import importlib.metadata

from seer.errors import ConfigError, MissingExtra

SUPPORTED = (0, 9)
"""The release whose classes are overridden here."""


def require_verl() -> None:
    """Raise if there is no verl, or another one."""
    try:
        version = importlib.metadata.version("verl")
    except importlib.metadata.PackageNotFoundError:
        raise MissingExtra("verl", "verl") from None
    if version.split(".")[:2] != [str(part) for part in SUPPORTED]:
        raise ConfigError(
            f"verl {version} is installed, Seer supports {SUPPORTED[0]}.{SUPPORTED[1]}.x",
            hint="pip install 'seer-rollout[verl]', or rollout.name=vllm",
        )
