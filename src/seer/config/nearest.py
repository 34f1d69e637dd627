# SPDX-License-Identifier: Apache-2.0
"""The hint for a name that does not exist: the nearest one that does, or all of them."""

from __future__ import annotations

import difflib
from collections.abc import Iterable


def nearest(name: str, known: Iterable[str]) -> str:
    """`did you mean X?` where one is near, and the list of names otherwise."""
    names = list(known)
    found = difflib.get_close_matches(name, names, n=1, cutoff=0.5)
    return f"did you mean {found[0]}?" if found else f"one of {', '.join(names)}"
