"""What importing Seer gives, and what it must not pull in."""

import importlib.resources
import subprocess
import sys

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
