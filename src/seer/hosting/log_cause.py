# SPDX-License-Identifier: Apache-2.0
"""Finds the error that ended a process in what it wrote.

Engines of several processes name it once, and then write pages of errors which only say that there was one.
"""

from __future__ import annotations

import re

MOST_CHARS = 400

_ERROR = re.compile(r"(?<![\w.])(?:\w+\.)*+[A-Z]\w*(?:Error|Exception): \S.*")
"""The last line of a traceback; a logger may have put its own words before it. A name is looked at once, from its
beginning: in time that grows with the log, and not faster, whatever a process writes."""
_IGNORED = "Exception ignored in"
"""Python's words for what a finalizer raised, with a traceback after it: many do in a process that ends."""


def root_error(log: str) -> str | None:
    """The last error in a log that does not point to another one."""
    found, is_ignored = None, False
    for line in log.splitlines():
        if _IGNORED in line:
            is_ignored = True
        elif (error := _ERROR.search(line)) is not None:
            if not is_ignored and not _points_elsewhere(error.group()):
                found = error.group()[:MOST_CHARS]
            is_ignored = False
    return found


def _points_elsewhere(error: str) -> bool:
    """Whether an error only says where another one stands: `See root cause above`."""
    text = error.lower()
    words = set(re.findall(r"\w+", text))
    return "root cause" in text or bool(words & {"see", "check"} and words & {"above", "below"})
