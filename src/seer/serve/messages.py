# SPDX-License-Identifier: Apache-2.0
"""Messages as OpenAI's clients send them, as chat templates read them: text content, and arguments as objects."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import msgspec

from seer.machine.json_files import UNREADABLE
from seer.runs.prompt_lines import NO_IMAGES, ROLES
from seer.serve.refusals import bad_request


def plain_messages(messages: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """Messages for a template; Refusal 400 says which one is bad."""
    if not messages:
        raise bad_request("messages is empty", param="messages")
    return [_plain(message, f"messages[{i}]") for i, message in enumerate(messages)]


def _plain(message: Mapping[str, Any], where: str) -> dict[str, Any]:
    role = message.get("role")
    if role not in ROLES:
        raise bad_request(f"{where}.role={role!r}", hint=f"one of {', '.join(ROLES)}", param=f"{where}.role")
    plain = {key: value for key, value in message.items() if value is not None}
    plain["content"] = _text(message.get("content"), where)
    if plain.get("tool_calls"):
        plain["tool_calls"] = [_tool_call(call, where) for call in plain["tool_calls"]]
    return plain


def _text(content: Any, where: str) -> str:
    """Content as one text: a string, parts of type text, or nothing."""
    if content is None:
        return ""
    if isinstance(content, str):
        return _whole_characters(content, where)
    if isinstance(content, list) and all(isinstance(part, Mapping) for part in content):
        if any(part.get("type") != "text" or not isinstance(part.get("text"), str) for part in content):
            raise bad_request(f"{where}.content: {NO_IMAGES}", param=f"{where}.content")
        return _whole_characters("".join(part["text"] for part in content), where)
    raise bad_request(f"{where}.content is a {type(content).__name__}, not text", param=f"{where}.content")


def _whole_characters(text: str, where: str) -> str:
    try:
        text.encode()
    except UnicodeEncodeError:
        raise bad_request(f"{where}.content has half a character (a lone surrogate)") from None
    return text


def _tool_call(call: Any, where: str) -> dict[str, Any]:
    """A call of an earlier turn; templates print its arguments as JSON themselves."""
    function = call.get("function") if isinstance(call, Mapping) else None
    if not isinstance(function, Mapping) or not isinstance(function.get("name"), str):
        raise bad_request(f"{where}.tool_calls has a call without a function's name", param=f"{where}.tool_calls")
    arguments = function.get("arguments", {})
    if isinstance(arguments, str):
        try:
            arguments = msgspec.json.decode(arguments or "{}")
        except UNREADABLE:
            raise bad_request(f"{where}.tool_calls: the arguments are not JSON") from None
    return {**call, "function": {**function, "arguments": arguments}}
