# SPDX-License-Identifier: Apache-2.0
"""Prompts from a file or from Python, all checked before anything heavy is loaded.

A file has one JSON object per line, with exactly one of

    {"prompt": "text"}                     taken as it is, no template
    {"messages": [{"role": ..., ...}]}     turned into a prompt by the model's chat template
    {"prompt_token_ids": [1, 2, 3]}

and optionally `id` (else the line number), `n`, `seed`, and any sampling setting (`max_tokens`,
`temperature`, ...).

All problems are reported at once, each with its line number. Those that need a tokenizer to find (a prompt that is too
long once encoded) are reported by `encode`, in the same form.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import Any

import msgspec

from seer.engine.text_codec import TextCodec
from seer.errors import InputError, SeerError
from seer.types import Sampling

ROLES = ("system", "user", "assistant", "tool", "developer")
"""The roles that chat templates know. Others are refused: a template may leave them out without an error."""
_KINDS = ("prompt", "messages", "prompt_token_ids")
_SAMPLING_KEYS = tuple(field.name for field in fields(Sampling))
_KEYS = (*_KINDS, "id", "n", "seed", *_SAMPLING_KEYS)
MAX_SHOWN = 20
"""Bad prompts that an error lists: more would not fit a screen."""

Messages = Sequence[Mapping[str, Any]]


@dataclass(frozen=True, slots=True, kw_only=True)
class Prompt:
    """One prompt as the user gave it; one of the first three is set."""

    text: str | None = None
    messages: tuple[Mapping[str, Any], ...] | None = None
    token_ids: tuple[int, ...] | None = None
    id: str
    n: int | None = None
    """Responses wanted; None takes the run's number."""
    seed: int | None = None
    sampling: Mapping[str, Any] | None = None
    """Settings that differ from the run's."""
    line: int | None = None

    def sampling_over(self, default: Sampling) -> Sampling:
        """The run's sampling with this prompt's own settings on top."""
        return replace(default, **self.sampling) if self.sampling else default


@dataclass(frozen=True, slots=True)
class BadPrompt:
    """A prompt that cannot be run, and why."""

    where: str
    why: str

    def __str__(self) -> str:
        return f"{self.where}: {self.why}"


@dataclass(frozen=True, slots=True)
class EncodedPrompt:
    """A prompt as tokens, with the sampling and the number of responses it gets."""

    prompt: Prompt
    token_ids: tuple[int, ...]
    sampling: Sampling
    n: int


def read_prompts(path: Path) -> tuple[list[Prompt], list[BadPrompt]]:
    """The good prompts of a file and the bad ones, both in the file's order."""
    try:
        lines = path.read_text(encoding="utf-8").splitlines()
    except (OSError, UnicodeDecodeError) as error:
        raise InputError(
            f"{path} cannot be read: {error}", hint="--prompts FILE.jsonl, one JSON object per line"
        ) from None
    good: list[Prompt] = []
    bad: list[BadPrompt] = []
    seen: dict[str, int] = {}
    for number, line in enumerate(lines, 1):
        if not line.strip():
            continue
        try:
            prompt = _read_line(line, number)
            if prompt.id in seen:
                raise InputError(f"id {prompt.id!r} was used on line {seen[prompt.id]}")
        except InputError as error:
            bad.append(BadPrompt(f"line {number}", str(error)))
            continue
        seen[prompt.id] = number
        good.append(prompt)
    if not good and not bad:
        raise InputError(f"{path} holds no prompt", hint='a line looks like {"prompt": "..."}')
    return good, bad


def as_prompts(given: Iterable[str | Messages | Sequence[int] | Prompt]) -> list[Prompt]:
    """Prompts given in Python: texts, conversations, token ids, or `Prompt`s; all problems in one error."""
    prompts: list[Prompt] = []
    bad: list[BadPrompt] = []
    for position, item in enumerate(given):
        try:
            prompts.append(item if isinstance(item, Prompt) else _from_value(item, str(position)))
        except InputError as error:
            bad.append(BadPrompt(f"prompt {position}", str(error)))
    refuse(bad)
    return prompts


def encode(
    prompts: Iterable[Prompt], codec: TextCodec | None, *, n: int, sampling: Sampling, max_model_len: int
) -> tuple[list[EncodedPrompt], list[BadPrompt]]:
    """Turn prompts into tokens and settle their sampling; those that cannot run come back as bad."""
    good: list[EncodedPrompt] = []
    bad: list[BadPrompt] = []
    for position, prompt in enumerate(prompts):
        try:
            good.append(_encode(prompt, codec, n, sampling, max_model_len))
        except SeerError as error:
            where = f"line {prompt.line}" if prompt.line is not None else f"prompt {position}"
            bad.append(BadPrompt(where, str(error)))
    return good, bad


def refuse(bad: Sequence[BadPrompt]) -> None:
    """Raise one error that lists every bad prompt; nothing if there is none."""
    if not bad:
        return
    shown = "; ".join(map(str, bad[:MAX_SHOWN]))
    more = f"; and {len(bad) - MAX_SHOWN} more" if len(bad) > MAX_SHOWN else ""
    raise InputError(f"{len(bad)} bad prompts: {shown}{more}", hint="--skip-bad goes on without them")


def _encode(prompt: Prompt, codec: TextCodec | None, n: int, sampling: Sampling, max_model_len: int) -> EncodedPrompt:
    if prompt.token_ids is not None:
        ids = prompt.token_ids
    elif codec is None:
        raise InputError("the model has no tokenizer; give prompt_token_ids")
    elif prompt.messages is not None:
        ids = tuple(codec.chat(prompt.messages))
    else:
        assert prompt.text is not None, f"prompt {prompt.id} has no content"
        ids = tuple(codec.encode(prompt.text))
    if not ids:
        raise InputError("the prompt encodes to no token")
    settled = prompt.sampling_over(sampling)
    if len(ids) + settled.max_tokens > max_model_len:
        raise InputError(
            f"{len(ids)} prompt tokens and max_tokens={settled.max_tokens} exceed the {max_model_len} tokens that fit"
        )
    return EncodedPrompt(prompt, ids, settled, prompt.n if prompt.n is not None else n)


def _read_line(line: str, number: int) -> Prompt:
    try:
        value = json.loads(line)
    except ValueError as error:
        raise InputError(f"not JSON: {error}") from None
    if not isinstance(value, dict):
        raise InputError(f"a {type(value).__name__}, not an object")
    unknown = [key for key in value if key not in _KEYS]
    if unknown:
        raise InputError(f"unknown key {unknown[0]!r}; the keys are {', '.join(_KEYS)}")
    kinds = [kind for kind in _KINDS if kind in value]
    if len(kinds) != 1:
        got = " and ".join(kinds) or "none"
        raise InputError(f"needs exactly one of {', '.join(_KINDS)}, got {got}")
    checks: dict[str, Callable[[Any], Prompt]] = {
        "prompt": lambda text: _from_text(text, ""),
        "messages": lambda messages: _from_messages(messages, ""),
        "prompt_token_ids": lambda ids: _from_ids(ids, ""),
    }
    content = checks[kinds[0]](value[kinds[0]])
    name = value.get("id", str(number))
    if not isinstance(name, str | int):
        raise InputError(f"id is a {type(name).__name__}, not a string or number")
    sampling = {key: value[key] for key in _SAMPLING_KEYS if key in value}
    try:
        checked = msgspec.convert({"max_tokens": 1 << 40} | sampling, Sampling)
    except (SeerError, msgspec.ValidationError) as error:
        raise InputError(str(error)) from None
    sampling = {key: getattr(checked, key) for key in sampling}
    return replace(
        content,
        id=str(name),
        n=_whole(value, "n", minimum=1),
        seed=_whole(value, "seed", minimum=0),
        sampling=sampling or None,
        line=number,
    )


def _from_value(item: str | Messages | Sequence[int], id: str) -> Prompt:
    if isinstance(item, str):
        return _from_text(item, id)
    if isinstance(item, Sequence) and item and isinstance(item[0], Mapping):
        return _from_messages(item, id)
    return _from_ids(item, id)


def _from_text(text: Any, id: str) -> Prompt:
    if not isinstance(text, str):
        raise InputError(f"prompt is a {type(text).__name__}, not text")
    if not text:
        raise InputError("the prompt is empty")
    return Prompt(text=text, id=id)


def _from_messages(messages: Any, id: str) -> Prompt:
    if not isinstance(messages, Sequence) or isinstance(messages, str) or not messages:
        raise InputError("messages is not a list of at least one message")
    for position, message in enumerate(messages):
        if not isinstance(message, Mapping):
            raise InputError(f"message {position} is a {type(message).__name__}, not an object")
        if message.get("role") not in ROLES:
            raise InputError(f"message {position} has the unknown role {message.get('role')!r}; use {', '.join(ROLES)}")
        if not isinstance(message.get("content"), str):
            raise InputError(f"message {position} has no text content")
    if not any(message["content"] for message in messages):
        raise InputError("every message is empty")
    return Prompt(messages=tuple(messages), id=id)


def _from_ids(ids: Any, id: str) -> Prompt:
    if not isinstance(ids, Sequence) or isinstance(ids, str) or not ids:
        raise InputError("not text, not messages, and not a list of at least one token id")
    if not all(isinstance(token, int) and not isinstance(token, bool) and token >= 0 for token in ids):
        raise InputError("token ids must be whole numbers of at least 0")
    return Prompt(token_ids=tuple(ids), id=id)


def _whole(value: Mapping[str, Any], key: str, *, minimum: int) -> int | None:
    number = value.get(key)
    if number is None:
        return None
    if not isinstance(number, int) or isinstance(number, bool) or number < minimum:
        raise InputError(f"{key}={number!r} should be a whole number of at least {minimum}")
    return number
