# SPDX-License-Identifier: Apache-2.0
"""Bodies of requests: read up to a limit, and decoded into a typed structure or refused with field, value and limit.

Invariants
  1. No more than `max_bytes` of a body are kept, whatever its headers say.
  2. A field that the structure does not have is refused: one that is ignored would look as if it had worked.
"""

from __future__ import annotations

import re
from typing import Any, TypeVar

import msgspec
from starlette.requests import ClientDisconnect, Request

from seer.machine.json_files import UNREADABLE
from seer.serve.refusals import Refusal, bad_request

T = TypeVar("T")
_PATH = re.compile(r" - at `(?:key in )?\$\.?(.*?)`$")
_UNKNOWN = re.compile(r"Object contains unknown field `(.*)`")
MAX_SHOWN_CHARS = 60


class ClientGone(Exception):  # noqa: N818 - reads as what it is
    """The client has closed the connection; no client is left to answer."""


async def read_body(request: Request, max_bytes: int) -> bytes:
    """The whole body; Refusal 413 if it is too large."""
    declared = request.headers.get("content-length", "")
    if declared.isdecimal() and int(declared[:20]) > max_bytes:
        raise _too_large(max_bytes)
    parts, num_bytes = [], 0
    try:
        async for part in request.stream():
            num_bytes += len(part)
            if num_bytes > max_bytes:
                raise _too_large(max_bytes)
            parts.append(part)
    except ClientDisconnect:
        raise ClientGone from None
    return b"".join(parts)


def decode(body: bytes, kind: type[T]) -> T:
    """The body as a structure; Refusal 400 says which field is wrong."""
    try:
        return msgspec.json.decode(body or b"{}", type=kind)
    except msgspec.ValidationError as error:
        raise _explain(str(error), body, kind) from None
    except UNREADABLE as error:
        raise bad_request(f"the body is not JSON: {error}") from None


def _too_large(max_bytes: int) -> Refusal:
    return Refusal(413, f"the body has more than {max_bytes:,} bytes", hint="send fewer prompts at once")


def _explain(message: str, body: bytes, kind: type[Any]) -> Refusal:
    """msgspec's message, with the value that it is about."""
    found = _PATH.search(message)
    path = found.group(1) if found else ""
    reason = message[: found.start()] if found else message
    unknown = _UNKNOWN.search(reason)
    if unknown is not None:
        fields = getattr(kind, "__struct_encode_fields__", ())
        hint = f"the fields are {', '.join(sorted(fields))}" if not path and fields else None
        return bad_request(f"unknown field {unknown.group(1)!r}", hint=hint, param=unknown.group(1))
    if not path:
        return bad_request(_lowered(reason))
    try:
        shown = repr(_value_at(msgspec.json.decode(body), path))
    except UNREADABLE:  # behind the bad field there is more that is wrong
        shown = "..."
    shown = shown if len(shown) <= MAX_SHOWN_CHARS else f"{shown[: MAX_SHOWN_CHARS - 3]}..."
    return bad_request(f"{path}={shown}: {_lowered(reason)}", param=path)


def _lowered(text: str) -> str:
    return text[:1].lower() + text[1:]


def _value_at(value: Any, path: str) -> Any:
    """The value at a path such as `prompt[0].n`; `...` where msgspec does not say which element."""
    for step in re.findall(r"[^.\[\]]+", path):
        try:
            value = value[int(step)] if isinstance(value, list) else value[step]
        except (KeyError, IndexError, ValueError, TypeError):
            return ...
    return value
