# SPDX-License-Identifier: Apache-2.0
"""Which group a request belongs to: siblings share drafts and length estimates, whenever they come.

In this order: the `group` field; the header X-Session-ID (or `session_id`) as `<uid>_<rep>`, whose uid names the group
(SkyRL); a session that was seen before, so that a conversation stays in its group as it grows; equal prompts.

A wrong guess changes no token: drafts are verified, and lengths only order the work.
"""

from __future__ import annotations

import hashlib
import re
from array import array
from collections import OrderedDict
from collections.abc import Sequence

MAX_SESSIONS = 65_536
"""Sessions remembered; the least recently used is forgotten first."""
MAX_NAME_CHARS = 256
_REPEAT = re.compile(r"(.+)_\d+", re.DOTALL)


class GroupNames:
    """Names groups."""

    def __init__(self, max_sessions: int = MAX_SESSIONS) -> None:
        self._max_sessions = max_sessions
        self._sessions: OrderedDict[str, str] = OrderedDict()

    def name(self, prompt: Sequence[int], *, group: str | None = None, session: str | None = None) -> str:
        """The group of a request for responses to this prompt."""
        if group is not None:
            return f"g:{_short(group)}"
        if session is None:
            return _of_prompt(prompt)
        repeat = _REPEAT.fullmatch(session)
        if repeat is not None:
            return f"s:{_short(repeat.group(1))}"
        found = self._sessions.pop(_short(session), None) or _of_prompt(prompt)
        self._sessions[_short(session)] = found
        if len(self._sessions) > self._max_sessions:
            self._sessions.popitem(last=False)
        return found

    def forget(self, session: str) -> None:
        """A session has ended."""
        self._sessions.pop(_short(session), None)


def _short(name: str) -> str:
    return name if len(name) <= MAX_NAME_CHARS else hashlib.sha256(name.encode("utf-8", "replace")).hexdigest()


def _of_prompt(prompt: Sequence[int]) -> str:
    return f"p:{hashlib.blake2b(array('q', prompt).tobytes(), digest_size=16).hexdigest()}"
