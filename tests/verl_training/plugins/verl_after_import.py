# SPDX-License-Identifier: Apache-2.0
"""Changes modules of verl and of Seer when a process imports them, for tests only.

verl loads external modules before its own are complete, so they cannot be changed at that moment.
"""

from __future__ import annotations

import importlib.abc
import importlib.machinery
import sys
from collections.abc import Callable, Mapping, Sequence
from types import ModuleType
from typing import Any

Changes = Mapping[str, Callable[[Any], None]]
"""By module."""


class _AfterImport(importlib.abc.MetaPathFinder):
    def __init__(self, changes: Changes) -> None:
        self._changes = changes

    def find_spec(
        self, name: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> importlib.machinery.ModuleSpec | None:
        if name not in self._changes:
            return None
        spec = importlib.machinery.PathFinder.find_spec(name, path, target)
        assert spec is not None
        assert spec.loader is not None
        load, change = spec.loader.exec_module, self._changes[name]

        def exec_module(module: ModuleType) -> None:
            load(module)
            change(module)

        spec.loader.exec_module = exec_module  # type: ignore[method-assign]
        return spec


def after_import(changes: Changes) -> None:
    """Make these changes in this process."""
    sys.meta_path.insert(0, _AfterImport(changes))
