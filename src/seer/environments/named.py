# SPDX-License-Identifier: Apache-2.0
"""Objects of the user's code by name, for command lines and settings: MODULE:NAME, or FILE.py:NAME.

A module is imported from the working folder or from what is installed. A file may import what stands beside it. Code is
only run where the command line or the settings name it: a resumed run repeats the option, because the folder of a run
may come from somebody else.
"""

from __future__ import annotations

import importlib
import importlib.util
import inspect
import sys
from collections.abc import Mapping, Sequence
from importlib.machinery import SourceFileLoader
from pathlib import Path
from types import ModuleType
from typing import Any

from seer.environments.base import Environment, Message, check_environment
from seer.errors import ConfigError, SeerError
from seer.machine.given_files import SETTINGS_BYTES, check_given

OPTION = "--environment "


def load_environment(name: str, option: str = OPTION) -> Environment:
    """The function, the object, or one made of the class of this name; `option` is what the user wrote it after."""
    found = _load(name, "environment", option)
    if inspect.isclass(found):
        found = _made(name, found)
    check_environment(found)
    environment: Environment = found
    return environment


def load_tools(name: str, option: str) -> Sequence[Message]:
    """The schemas of this name: one, or a list of them."""
    found = _load(name, "tools", option)
    schemas = [found] if isinstance(found, Mapping) else found
    if not isinstance(schemas, list | tuple) or not all(isinstance(one, Mapping) for one in schemas):
        raise ConfigError(
            f"tools {name!r} are a {type(found).__name__}, not schemas", hint="a schema, or a list of them"
        )
    return schemas


def with_whole_path(name: str) -> str:
    """The same name for processes with another working folder."""
    where, colon, attribute = name.partition(":")
    return f"{Path(where).absolute()}{colon}{attribute}" if where.endswith(".py") else name


def _load(name: str, what: str, option: str) -> Any:
    hint = f"{option}MODULE:NAME or FILE.py:NAME, for example tools:calculator for calculator of tools.py"
    where, colon, attribute = name.partition(":")
    if not colon or not where or not attribute:
        raise ConfigError(f"{what} {name!r} names no object of a module", hint=hint)
    try:
        return getattr(_from_file(Path(where)) if where.endswith(".py") else _from_path(where), attribute)
    except KeyboardInterrupt:
        raise
    except BaseException as error:  # whatever a module does when it is imported
        raise ConfigError(f"{what} {name!r} cannot be imported: {_said(error)}", hint=hint) from error


def _from_path(module: str) -> ModuleType:
    if str(Path.cwd()) not in sys.path:
        sys.path.insert(0, str(Path.cwd()))
    return importlib.import_module(module)


def _from_file(path: Path) -> ModuleType:
    """The module in a file, loaded once: two names in one file see the same objects."""
    path = check_given(path.resolve(), limit_bytes=SETTINGS_BYTES)
    name = f"seer_file_{path.stem}_{abs(hash(path)):x}"
    if name in sys.modules:
        return sys.modules[name]
    if str(path.parent) not in sys.path:
        sys.path.append(str(path.parent))
    loader = SourceFileLoader(name, str(path))  # a link may lead to a file of another ending
    spec = importlib.util.spec_from_file_location(name, path, loader=loader)
    assert spec is not None, "the loader was given"
    module = sys.modules[name] = importlib.util.module_from_spec(spec)
    try:
        loader.exec_module(module)
    except BaseException:
        del sys.modules[name]
        raise
    return module


def _made(name: str, kind: type) -> object:
    try:
        return kind()
    except KeyboardInterrupt:
        raise
    except BaseException as error:
        hint = "make the object in the module, and name that"
        raise ConfigError(
            f"environment {name!r} cannot be made without arguments: {_said(error)}", hint=hint
        ) from error


def _said(error: BaseException) -> str:
    """What an error of the user's code says, with its kind where the words alone do not tell."""
    plain = (ImportError, AttributeError, OSError, SeerError, TypeError)
    return str(error) if isinstance(error, plain) else f"{type(error).__name__}: {error}"
