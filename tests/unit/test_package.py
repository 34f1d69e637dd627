# SPDX-License-Identifier: Apache-2.0
"""What importing Seer gives, and what it must not pull in."""

import importlib.resources
import subprocess
import sys
from pathlib import Path

import pytest

import seer
from seer import errors

HEAVY = ("torch", "vllm", "ray", "transformers", "trl", "verl", "mooncake")


def test_exported_names_are_what_can_be_imported() -> None:
    assert len(seer.__all__) == len(set(seer.__all__))
    for name in seer.__all__:
        assert getattr(seer, name).__module__.startswith("seer."), f"seer.{name} is not ours"
    assert sorted(dir(seer)) == sorted(seer.__all__)
    with pytest.raises(AttributeError, match="no_such_name"):
        seer.no_such_name  # noqa: B018


def test_type_checkers_of_users_see_our_types() -> None:
    assert importlib.resources.files("seer").joinpath("py.typed").is_file()


def test_every_error_is_exported() -> None:
    leaves = {name for name, value in vars(errors).items() if isinstance(value, type)}
    assert leaves <= set(seer.__all__)


@pytest.mark.parametrize("module", ["seer", "seer.cli.main", "seer.cli.simulate", "seer.rollout", "seer.sim.cluster"])
def test_the_core_imports_nothing_heavy(module: str) -> None:
    code = f"import sys, {module}; print(*(set(sys.modules) & set({HEAVY!r})))"
    loaded = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout.split()
    assert loaded == []


def test_building_the_whole_command_line_imports_nothing_heavy() -> None:
    code = (
        "import sys; from seer.cli.main import build_parser; build_parser(); "
        f"print(*(set(sys.modules) & set({HEAVY!r})))"
    )
    loaded = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout.split()
    assert loaded == []


def test_every_source_file_names_its_licence() -> None:
    root = Path(__file__).parents[2]
    files = [path for folder in ("src", "tests", "benchmarks", "examples") for path in (root / folder).rglob("*.py*")]
    native = [path for kind in ("*.cc", "*.h") for path in (root / "csrc").rglob(kind)]
    sources = [path for path in files + native if path.suffix in (".py", ".pyi", ".cc", ".h") and path.stat().st_size]
    assert len(sources) > 300
    for path in sources:
        assert "SPDX-License-Identifier: Apache-2.0" in path.read_text().partition("\n")[0], path
