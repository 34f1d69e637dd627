# SPDX-License-Identifier: Apache-2.0
"""`--environment MODULE:NAME`: what responses talk to after each turn.

The module is imported from the working folder or from what is installed. Code is only run where the command line names
it: a resumed run repeats the option, because the folder of a run may come from somebody else.
"""

from __future__ import annotations

import importlib
import inspect
import sys
from pathlib import Path

from seer.environments.base import Environment, check_environment
from seer.errors import ConfigError

_HINT = "--environment MODULE:NAME, for example tools:calculator for the function calculator of tools.py"


def load_environment(name: str) -> Environment:
    """The function, the object, or one made of the class of this name."""
    module, colon, attribute = name.partition(":")
    if not colon or not module or not attribute:
        raise ConfigError(f"environment {name!r} names no object of a module", hint=_HINT)
    if str(Path.cwd()) not in sys.path:
        sys.path.insert(0, str(Path.cwd()))
    try:
        found = getattr(importlib.import_module(module), attribute)
    except (ImportError, AttributeError) as error:
        raise ConfigError(f"environment {name!r} cannot be imported: {error}", hint=_HINT) from error
    if inspect.isclass(found):
        found = _made(name, found)
    check_environment(found)
    environment: Environment = found
    return environment


def _made(name: str, kind: type) -> object:
    try:
        return kind()
    except TypeError as error:
        hint = "make the object in the module, and name that"
        raise ConfigError(f"environment {name!r} cannot be made without arguments: {error}", hint=hint) from error
