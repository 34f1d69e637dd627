# SPDX-License-Identifier: Apache-2.0
"""One prompt as somebody gave it, in a line of a file or in Python, checked into a `Prompt`.

Invariants
  1. Texts can be written as UTF-8, token ids fit 32 bits, and every number is within the range of its field: those of
     `Prompt` and of `seer.types.Sampling`.
"""

from __future__ import annotations

import typing
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, fields, replace
from typing import Any

import msgspec

from seer.errors import ConfigError, InputError
from seer.machine.json_files import UNREADABLE
from seer.ranges import INT32_MAX, Priority, Responses, Seed, TokenId, check, check_fields
from seer.types import Sampling

ROLES = ("system", "user", "assistant", "tool", "developer")
"""The roles that chat templates know. Others are refused: a template may leave them out without an error."""

Messages = Sequence[Mapping[str, Any]]


@dataclass(frozen=True, slots=True, kw_only=True)
class Prompt:
    """One prompt as the user gave it; one of the first three is set."""

    text: str | None = None
    messages: tuple[Mapping[str, Any], ...] | None = None
    token_ids: tuple[int, ...] | None = None
    id: str
    n: Responses | None = None
    """Responses wanted; None takes the run's number."""
    seed: Seed | None = None
    priority: Priority = 0
    """A prompt starts after those of a higher priority have started."""
    sampling: Mapping[str, Any] | None = None
    """Settings that differ from the run's."""
    line: int | None = None

    def __post_init__(self) -> None:
        """Refuse what cannot run."""
        check_fields(self)
        if sum(content is not None for content in (self.text, self.messages, self.token_ids)) != 1:
            raise InputError("a prompt needs exactly one of text, messages and token_ids")
        if not isinstance(self.id, str):
            raise InputError(f"id is a {type(self.id).__name__}, not text")
        for name, value in (self.sampling or {}).items():
            if name not in _SAMPLING:
                raise InputError(f"unknown sampling setting {name!r}", hint=f"one of {', '.join(_SAMPLING)}")
            check(value, _SAMPLING[name], name)

    def sampling_over(self, default: Sampling) -> Sampling:
        """The run's sampling with this prompt's own settings on top."""
        return replace(default, **self.sampling) if self.sampling else default


PromptInput = str | Messages | Sequence[int] | Mapping[str, Any] | Prompt
"""A prompt in Python: a text, messages, token ids, an object as in a line of a file, or a `Prompt`."""
_OWN: dict[str, Any] = {"id": str | int | None, "n": Responses | None, "seed": Seed | None, "priority": Priority}
"""What a line may say beside its prompt and its sampling settings. An id that is None is the number of the line."""
_SAMPLING = {
    name: kind
    for name, kind in typing.get_type_hints(Sampling, include_extras=True).items()
    if name in {field.name for field in fields(Sampling)}
}


NO_IMAGES = "prompts with images, video or sound are not supported: give the text alone"
_MEDIA = {"image", "images", "video", "videos", "audio", "multi_modal_data"}
"""Names under which other tools give them."""


def read_line(line: bytes, number: int) -> Prompt:
    """The prompt in a line of a file; InputError says what is wrong with it."""
    return replace(_from_object(_decode(line), str(number)), line=number)


def from_value(item: PromptInput, id: str) -> Prompt:
    """A prompt given in Python. Without an id of its own it gets this one."""
    if isinstance(item, Prompt):
        return item
    if isinstance(item, str):
        return _from_text(item, id)
    if isinstance(item, Mapping):
        return _from_object(item, id)
    if _are_messages(item):
        return _from_messages(item, id)
    return _from_ids(item, id)


def _from_object(value: Mapping[str, Any], default_id: str) -> Prompt:
    known = (*_CONTENTS, *_OWN, *_SAMPLING)
    unknown = [key for key in value if key not in known]
    if any(key in _MEDIA for key in unknown):
        raise InputError(NO_IMAGES)
    if unknown:
        raise InputError(f"unknown key {unknown[0]!r}; the keys are {', '.join(known)}")
    kinds = [kind for kind in _CONTENTS if kind in value]
    if len(kinds) != 1:
        got = " and ".join(kinds) or "none"
        raise InputError(f"needs exactly one of {', '.join(_CONTENTS)}, got {got}")
    content = _CONTENTS[kinds[0]](value[kinds[0]], "")
    try:
        own = {key: _checked(value[key], kind, key) for key, kind in _OWN.items() if key in value}
        sampling = {key: _checked(value[key], kind, key) for key, kind in _SAMPLING.items() if key in value}
    except ConfigError as error:
        raise InputError(f"{error}; {error.hint}") from None
    name = own.pop("id", None)
    return replace(content, id=default_id if name is None else str(name), sampling=sampling or None, **own)


def _decode(line: bytes) -> dict[str, Any]:
    try:
        value = msgspec.json.decode(line)
    except UNREADABLE as error:
        raise InputError(f"not JSON: {error}") from None
    if not isinstance(value, dict):
        raise InputError(f"a {type(value).__name__}, not an object")
    return value


def _checked(value: Any, kind: Any, name: str) -> Any:
    check(value, kind, name)
    return msgspec.convert(value, kind)


def _are_messages(value: Any) -> bool:
    return isinstance(value, Sequence) and bool(value) and isinstance(value[0], Mapping)


def _from_prompt(prompt: Any, id: str) -> Prompt:
    """A text, or messages, as TRL's data sets have them."""
    return _from_messages(prompt, id) if _are_messages(prompt) else _from_text(prompt, id)


def _from_text(text: Any, id: str) -> Prompt:
    if not isinstance(text, str):
        raise InputError(f"prompt is a {type(text).__name__}, not text")
    if not text:
        raise InputError("the prompt is empty")
    _refuse_surrogates(text)
    return Prompt(text=text, id=id)


def _from_messages(messages: Any, id: str) -> Prompt:
    if not isinstance(messages, Sequence) or isinstance(messages, str) or not messages:
        raise InputError("messages is not a list of at least one message")
    for position, message in enumerate(messages):
        if not isinstance(message, Mapping):
            raise InputError(f"message {position} is a {type(message).__name__}, not an object")
        if message.get("role") not in ROLES:
            raise InputError(f"message {position} has the unknown role {message.get('role')!r}; use {', '.join(ROLES)}")
        if _has_media(message.get("content")):
            raise InputError(f"message {position}: {NO_IMAGES}")
        if not isinstance(message.get("content"), str):
            raise InputError(f"message {position} has no text content")
        _refuse_surrogates(message["content"])
    if not any(message["content"] for message in messages):
        raise InputError("every message is empty")
    return Prompt(messages=tuple(messages), id=id)


def _has_media(content: Any) -> bool:
    """Whether this is content in parts, as chat APIs have it, with an image, video or sound among them."""
    parts = content if isinstance(content, Sequence) and not isinstance(content, str) else ()
    return any(isinstance(part, Mapping) and part.get("type") not in (None, "text") for part in parts)


def _from_ids(ids: Any, id: str) -> Prompt:
    if not isinstance(ids, Sequence) or isinstance(ids, str) or not ids:
        raise InputError("not text, not messages, and not a list of at least one token id")
    try:
        return Prompt(token_ids=tuple(msgspec.convert(ids, list[TokenId])), id=id)
    except msgspec.ValidationError:
        raise InputError(f"token ids must be whole numbers from 0 to {INT32_MAX:,}") from None


def _refuse_surrogates(text: str) -> None:
    """Half of a character outside the first 65,536, which Python can hold and no file or tokenizer can."""
    try:
        text.encode()
    except UnicodeEncodeError as error:
        raise InputError(f"the text has half a character (a lone surrogate) at position {error.start}") from None


_CONTENTS: dict[str, Callable[[Any, str], Prompt]] = {
    "prompt": _from_prompt,
    "messages": _from_messages,
    "prompt_token_ids": _from_ids,
}
