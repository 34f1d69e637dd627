# SPDX-License-Identifier: Apache-2.0
"""What releases of vLLM have of the names that our classes override, replace or call, read from their sources.

    python tests/vllm_names.py FOLDER   records the release unpacked there (its sdist or wheel) in vllm_names.json

`offer` then stands in for that release where the guards import it.
"""

from __future__ import annotations

import ast
import json
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from seer.engine.vllm.guards import Names

RECORDED = Path(__file__).with_suffix(".json")
Recorded = dict[str, dict[str, dict[str, list[str]]]]
"""Module, then name: a function under "", a class by its methods and fields; each with its arguments."""


def read() -> dict[str, Recorded]:
    """The recorded releases."""
    recorded: dict[str, Recorded] = json.loads(RECORDED.read_text())
    return recorded


def offer(recorded: Recorded) -> Any:
    """In the place of `importlib.import_module`: modules of that release, with what was recorded."""

    def import_module(module: str) -> SimpleNamespace:
        if module not in recorded:
            raise ImportError(module)
        return SimpleNamespace(**{name: _made(parts) for name, parts in recorded[module].items()})

    return import_module


def _made(parts: dict[str, list[str]]) -> Any:
    made = {part: _function(arguments) for part, arguments in parts.items()}
    return made[""] if "" in made else SimpleNamespace(**made)


def _function(arguments: list[str]) -> Any:
    return eval(f"lambda {', '.join(f'{one}=None' for one in arguments)}: None")


def record(folder: Path, wanted: Names) -> Recorded:
    """What the release in this folder has of the wanted names."""
    found: Recorded = {}
    for module, name, parts in wanted:
        has = _parts(folder, module, name, parts)
        if has is not None:
            found.setdefault(module, {}).setdefault(name, {}).update(has)
    return found


def _parts(folder: Path, module: str, name: str, wanted: tuple[str, ...]) -> dict[str, list[str]] | None:
    path = folder.joinpath(*module.split("."))
    file = path / "__init__.py" if path.is_dir() else path.with_suffix(".py")
    if not file.exists():
        return None
    for node in ast.walk(ast.parse(file.read_text())):
        if isinstance(node, ast.FunctionDef) and node.name == name:
            return {"": _arguments(node)}
        if isinstance(node, ast.ClassDef) and node.name == name:
            methods = [one for one in node.body if isinstance(one, ast.FunctionDef | ast.AsyncFunctionDef)]
            return {one.name: _arguments(one) for one in methods if one.name in wanted}
        if isinstance(node, ast.ImportFrom) and node.module and any(one.name == name for one in node.names):
            return _parts(folder, node.module, name, wanted)
    return None


def _arguments(node: ast.FunctionDef | ast.AsyncFunctionDef) -> list[str]:
    return [one.arg for one in (*node.args.args, *node.args.kwonlyargs)]


def _lines(recorded: dict[str, Recorded]) -> str:
    """JSON with a line for each module of a release."""
    releases = (
        f"{json.dumps(release)}: {{\n"
        + ",\n".join(f" {json.dumps(module)}: {json.dumps(names)}" for module, names in sorted(modules.items()))
        + "\n}"
        for release, modules in sorted(recorded.items())
    )
    return "{\n" + ",\n".join(releases) + "\n}\n"


def main() -> None:
    """Record one release."""
    from seer.engine.vllm import guards
    from seer.engine.vllm.gpu_drafts import install

    folder = Path(sys.argv[1])
    kept = {} if not RECORDED.exists() else read()
    kept[folder.name] = record(folder, (*guards.CPU_DRAFTS, *guards.POOL, *install.NEEDED))
    RECORDED.write_text(_lines(kept))


if __name__ == "__main__":
    main()
