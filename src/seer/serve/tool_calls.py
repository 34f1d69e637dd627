# SPDX-License-Identifier: Apache-2.0
"""Tool calls in a response, as Hermes and Qwen write them.

<tool_call>{"name": "look_up", "arguments": {"word": "seer"}}</tool_call>
"""

from __future__ import annotations

import secrets
from collections.abc import Iterator
from typing import Any

import msgspec

from seer.machine.json_files import UNREADABLE
from seer.serve.text_stream import start_of_partial

_OPEN, _CLOSE = "<tool_call>", "</tool_call>"


def split_tool_calls(text: str) -> tuple[str | None, list[dict[str, Any]]]:
    """The text before the first call, as it is, and the calls; text with a call that is no JSON stays text."""
    found = list(_bodies(text))
    calls = [_call(body) for _, body in found]
    if not calls or None in calls:
        return text, []
    return text[: found[0][0]] or None, [call for call in calls if call is not None]


def num_before_calls(text: str) -> int:
    """Characters before the first opening tag, or before the end of the text that may become one."""
    at = text.find(_OPEN)
    return at if at >= 0 else start_of_partial(text, (_OPEN,))


def _bodies(text: str) -> Iterator[tuple[int, str]]:
    """Where each call begins, and what is between its tags. One pass: a response may be thousands of opening tags."""
    at = text.find(_OPEN)
    while at >= 0:
        end = text.find(_CLOSE, at)
        if end < 0:
            return
        yield at, text[at + len(_OPEN) : end]
        at = text.find(_OPEN, end)


def _call(text: str) -> dict[str, Any] | None:
    try:
        value = msgspec.json.decode(text.strip())
    except UNREADABLE:
        return None
    if not isinstance(value, dict) or not isinstance(value.get("name"), str):
        return None
    arguments = value.get("arguments", {})
    text = arguments if isinstance(arguments, str) else msgspec.json.encode(arguments).decode()
    function = {"name": value["name"], "arguments": text}
    return {"id": f"call_{secrets.token_hex(12)}", "type": "function", "function": function}
