# SPDX-License-Identifier: Apache-2.0
"""Bodies of requests: read up to a limit, and decoded into a typed structure or refused with field, value and limit.

Invariants
  1. No more than `max_bytes` of a body are kept, whatever its headers say, and of all bodies that are being read no
     more than MAX_UNREAD_BODIES times as much.
  2. A body of which nothing comes for `idle_s` is given up.
  3. A field that the structure does not have is refused: one that is ignored would look as if it had worked.
"""

from __future__ import annotations

import asyncio
import re
from collections.abc import AsyncGenerator
from typing import Any, Literal, TypeVar, get_args, get_origin, get_type_hints

import msgspec
from starlette.requests import ClientDisconnect, Request

from seer.machine.json_files import UNREADABLE
from seer.serve.refusals import Refusal, bad_request

T = TypeVar("T")
_PATH = re.compile(r" - at `(?:key in )?\$\.?(.*?)`$")
_UNKNOWN = re.compile(r"Object contains unknown field `(.*)`")
MAX_SHOWN_CHARS = 60
MAX_UNREAD_BODIES = 8
"""Of the largest size, at once. Clients that send no more than they may never meet it."""


class ClientGone(Exception):  # noqa: N818 - reads as what it is
    """The client has closed the connection; no client is left to answer."""


class Bodies:
    """Reads the bodies of requests, within one amount of memory for all of them."""

    def __init__(self, max_bytes: int, idle_s: float) -> None:
        self._max_bytes = max_bytes
        self._idle_s = idle_s
        self._num_held = 0

    async def read(self, request: Request) -> bytes:
        """The whole body; Refusal 413 if it is too large, 408 if it does not come, 429 if too many are being read."""
        declared = request.headers.get("content-length", "")
        if declared.isdecimal() and int(declared[:20]) > self._max_bytes:
            raise _too_large(self._max_bytes)
        parts: list[bytes] = []
        num_bytes = 0
        try:
            async for part in self._parts(request):
                num_bytes += len(part)
                self._num_held += len(part)
                if num_bytes > self._max_bytes:
                    raise _too_large(self._max_bytes)
                if self._num_held > MAX_UNREAD_BODIES * self._max_bytes:
                    raise Refusal(429, "too many bodies are being read at once", hint="send fewer requests at once")
                parts.append(part)
        finally:
            self._num_held -= num_bytes
        return b"".join(parts)

    async def _parts(self, request: Request) -> AsyncGenerator[bytes, None]:
        stream = request.stream()
        try:
            while True:
                async with asyncio.timeout(self._idle_s):
                    part = await anext(stream)
                yield part
        except StopAsyncIteration:
            return
        except TimeoutError:
            raise Refusal(408, f"nothing of the body came for {self._idle_s:g} s") from None
        except ClientDisconnect:
            raise ClientGone from None


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
    few = _few_values(get_type_hints(kind).get(path))
    hint = f"one of {', '.join(msgspec.json.encode(value).decode() for value in few)}" if few else None
    try:
        shown = repr(_value_at(msgspec.json.decode(body), path))
    except UNREADABLE:  # behind the bad field there is more that is wrong
        shown = "..."
    shown = shown if len(shown) <= MAX_SHOWN_CHARS else f"{shown[: MAX_SHOWN_CHARS - 3]}..."
    return bad_request(f"{path}={shown}: {_lowered(reason)}", hint=hint, param=path)


def _few_values(hint: Any) -> list[Any]:
    """The values of a field that takes only these, as `tool_choice`; none for any other field."""
    if get_origin(hint) is Literal:
        return list(get_args(hint))
    return [value for one in get_args(hint) for value in _few_values(one)]


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
