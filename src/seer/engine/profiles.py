# SPDX-License-Identifier: Apache-2.0
"""Where step profiles are kept, and which one fits an engine.

`seer profile` writes a profile into the user's cache folder, and a rollout reads it when its instances start: the first
run then drafts by measured costs from its first step. A file is found by everything that a step's cost depends on:
the model's shape, engine, device, type and threads. New weights of the same shape have the same costs.

Invariants
  1. A profile is used only for the model, device, engine, type and threads that it was measured with.
  2. One that was measured with other versions of Seer or torch, or cannot be read, is ignored with one line.
"""

from __future__ import annotations

import hashlib
import logging
import os
import platform
from dataclasses import astuple, dataclass
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

from seer.config import LocalEngineConfig, RolloutConfig
from seer.errors import InputError
from seer.machine.given_files import MODEL_JSON_BYTES, read_given
from seer.speculation.step_profile import StepProfile

log = logging.getLogger(__name__)

PACKAGES = ("seer-rollout", "torch", "triton")
"""Whose versions change the cost of a step."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ProfileKey:
    """What the cost of a step depends on."""

    model: str
    """A digest of its configuration."""
    engine: str
    device: str
    """Name of the CPU or GPU."""
    dtype: str
    threads: int

    @property
    def path(self) -> Path:
        """The file of this profile."""
        digest = hashlib.blake2b(repr(astuple(self)).encode(), digest_size=12).hexdigest()
        return profiles_dir() / f"{digest}.json"


def profiles_dir() -> Path:
    """$XDG_CACHE_HOME/seer/profiles, or ~/.cache/seer/profiles."""
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "seer" / "profiles"


def local_key(model_dir: Path, *, device: str, dtype: str, threads: int) -> ProfileKey:
    """The key of the embedded engine with a model."""
    config = read_given(model_dir / "config.json", limit_bytes=MODEL_JSON_BYTES)
    model = hashlib.blake2b(config, digest_size=12).hexdigest()
    return ProfileKey(model=model, engine="local", device=device_name(device), dtype=dtype, threads=threads)


def find_profile(config: RolloutConfig) -> Path | None:
    """The profile that fits a resolved configuration; None if there is none, or it is stale."""
    engine = config.engine_settings
    if not isinstance(engine, LocalEngineConfig):
        return None
    try:
        key = local_key(Path(config.model), device=config.device, dtype=_dtype(config), threads=engine.threads)
        found = StepProfile.load(key.path) if key.path.exists() else None
    except (OSError, InputError) as error:
        log.warning("the step profile is ignored: %s", error)
        return None
    if found is not None and found.versions != versions():
        log.warning(
            "the step profile %s is ignored: it was measured with %s, this is %s (`seer profile` makes a new one)",
            key.path,
            found.versions or "unknown versions",
            versions(),
        )
        return None
    return key.path if found is not None else None


def versions() -> str:
    """Of what measures and computes."""
    shown = []
    for package in PACKAGES:
        try:
            shown.append(f"{package} {version(package)}")
        except PackageNotFoundError:
            continue
    return ", ".join(shown)


def device_name(device: str) -> str:
    """The model of the CPU or GPU that a device stands for."""
    if device == "cpu":
        return _cpu_name()
    try:
        import torch
    except ImportError:
        return device
    index = int(device.partition(":")[2] or 0)
    if not torch.cuda.is_available() or index >= torch.cuda.device_count():
        return device
    return torch.cuda.get_device_name(index)


def _dtype(config: RolloutConfig) -> str:
    if config.dtype != "auto":
        return config.dtype
    return "float32" if config.on_cpu else "bfloat16"


def _cpu_name() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return platform.machine()
    return next((line.partition(":")[2].strip() for line in lines if line.startswith("model name")), platform.machine())
