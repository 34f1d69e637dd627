# SPDX-License-Identifier: Apache-2.0
"""Numbers and names that Seer takes from outside: each kind is a type with its range, and msgspec refuses the rest.

Fields of the configuration, columns of files and options of the command line are declared with these types. Nothing
else checks the range of a single number, so a new field is checked as soon as it has a type.

Invariants
  1. Every range of numbers has two ends. NaN, infinities and integers beyond 64 bits are therefore outside all of them.
  2. A value that is refused is named with its range: `n=0 is out of range`, `use 1 to 65,536`.
"""

from __future__ import annotations

import dataclasses
import functools
import numbers
import operator
import os
import types
import typing
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

import msgspec
from msgspec import Meta

from seer.errors import ConfigError

INT32_MAX = (1 << 31) - 1
INT64_MAX = (1 << 63) - 1
YEAR_S = 31_536_000

Count = Annotated[int, Meta(ge=1, le=INT32_MAX)]
CountOrZero = Annotated[int, Meta(ge=0, le=INT32_MAX)]
TokenId = Annotated[int, Meta(ge=0, le=INT32_MAX)]
Seed = Annotated[int, Meta(ge=0, le=INT64_MAX)]
Priority = Annotated[int, Meta(ge=-1_000_000, le=1_000_000)]
NAME_PATTERN = r"[A-Za-z0-9._-]{1,64}"
FileName = Annotated[str, Meta(pattern=rf"\A{NAME_PATTERN}\Z", description="1 to 64 letters, digits, '.', '_' or '-'")]
"""A name that becomes a part of a file's name, and so can name no other place."""
Port = Annotated[int, Meta(ge=0, le=65_535)]
"""0 lets the system choose."""
NumBytes = Annotated[int, Meta(ge=1, le=1 << 50)]
"""Up to 1 PiB, as `seer.machine.sizes` has it."""
NumBytesOrZero = Annotated[int, Meta(ge=0, le=1 << 50)]
Responses = Annotated[int, Meta(ge=1, le=65_536)]
"""To one prompt: a group is held in memory until its last response has ended."""
Instances = Annotated[int, Meta(ge=1, le=1024)]
"""Processes of one machine."""
Threads = Annotated[int, Meta(ge=1, le=1024)]
SequenceSlots = Annotated[int, Meta(ge=1, le=1 << 20)]
BlockSize = Annotated[int, Meta(ge=1, le=65_536)]
DraftTokens = Annotated[int, Meta(ge=1, le=128)]
"""Per request and step: vLLM verifies at most 128 tokens of a request in a step."""
Repeats = Annotated[int, Meta(ge=1, le=100_000)]
"""How often a measurement or a run is made again."""
SimulatedInstances = Annotated[int, Meta(ge=1, le=65_536)]
SimulatedGpus = Annotated[int, Meta(ge=1, le=4096)]
"""Of one instance."""
Gigabits = Annotated[float, Meta(gt=0, le=1e6)]
"""Per second, of a network card."""
Seconds = Annotated[float, Meta(gt=0, le=YEAR_S)]
SecondsOrZero = Annotated[float, Meta(ge=0, le=YEAR_S)]
Share = Annotated[float, Meta(gt=0, le=1)]
Probability = Annotated[float, Meta(ge=0, le=1)]
LogSpread = Annotated[float, Meta(ge=0, le=5)]
"""Standard deviation of the logarithm of a length; 0 makes all lengths equal."""
StopString = Annotated[str, Meta(min_length=1, max_length=1024, description="a list of strings, none of them empty")]
Temperature = Annotated[float, Meta(ge=0, le=1000)]
"""0 is greedy."""


def check(value: Any, kind: Any, name: str) -> Any:
    """The value, numbers of numpy as Python's. One of another kind is refused; `name` is how its user knows it."""
    plain = _plain(value)
    try:
        msgspec.convert(plain, kind)
    except (msgspec.ValidationError, UnicodeError) as error:  # UnicodeError: bytes of a command line that are no text
        raise ConfigError(f"{name}={_refusal(plain, kind, error)}", hint=f"use {describe(kind)}") from None
    return plain


def check_path(value: Any, name: str) -> Path:
    """Text or a path as a path; refused is what no path can be."""
    if not isinstance(value, str | os.PathLike):
        raise ConfigError(f"{name}={value!r:.60} is no path", hint="use text or a pathlib.Path")
    if "\0" in str(value):
        raise ConfigError(f"{name}={str(value)!r} has a NUL character", hint="no path has one")
    return Path(value)


def check_fields(owner: Any) -> None:
    """For `__post_init__` of a dataclass: refuse a field that is not within the range of its type, and a flag that is
    none. Numbers of numpy become Python's, which can be sent to other processes, and text becomes a path.
    """
    cls: type = type(owner)
    fields = _fields(cls)
    for name, kind in fields.checked:
        value = getattr(owner, name)
        if (plain := check(value, kind, name)) is not value:
            object.__setattr__(owner, name, plain)
    for name in fields.paths:
        value = getattr(owner, name)
        if value is not None:
            object.__setattr__(owner, name, check_path(value, name))


def describe(kind: Any) -> str:
    """The range of a kind in words: `1 to 65,536`, `above 0 and at most 1`."""
    meta = _meta(kind)
    if meta is None:
        return f"a value of type {getattr(kind, '__name__', kind)}"
    if meta.description is not None:
        return meta.description
    if meta.gt is not None:
        return f"above {meta.gt:,} and at most {meta.le:,}"
    return f"{meta.ge:,} to {meta.le:,}"


def has_range(kind: Any) -> bool:
    """Whether a kind is a number with a range, such a number or None, or a tuple of such numbers."""
    return _meta(kind) is not None


def base_type(kind: Any) -> Any:
    """`int` or `float` of a kind of number, without its range and without None."""
    for option in _options(kind):
        if option is not type(None):
            return typing.get_args(option)[0] if typing.get_origin(option) is Annotated else option
    return kind


def _refusal(value: Any, kind: Any, error: Exception) -> str:
    shown = repr(value)
    shown = shown if len(shown) <= 60 else f"{shown[:57]}..."
    is_number = isinstance(value, int | float) and not isinstance(value, bool)
    if is_number and _meta(kind) is not None and (base_type(kind) is float or isinstance(value, int)):
        return f"{shown} is out of range"
    reason = str(error).split(" - at ")[0]
    return f"{shown}: {reason[:1].lower()}{reason[1:]}"


def _plain(value: Any) -> Any:
    """Numbers of numpy as Python's, because msgspec knows only those; anything else as it is."""
    if type(value) is tuple:
        plain = tuple(map(_plain, value))
        return value if all(map(operator.is_, plain, value)) else plain
    if type(value) in (bool, int, float) or not isinstance(value, numbers.Real):
        return value
    return int(value) if isinstance(value, numbers.Integral) else float(value)


@dataclass(frozen=True, slots=True)
class _Fields:
    """Of a dataclass, those that are checked."""

    checked: tuple[tuple[str, Any], ...]
    paths: tuple[str, ...]


@functools.cache
def _fields(owner: type) -> _Fields:
    hints = typing.get_type_hints(owner, include_extras=True)
    kinds = {field.name: hints[field.name] for field in dataclasses.fields(owner)}
    return _Fields(
        checked=tuple((name, kind) for name, kind in kinds.items() if has_range(kind) or bool in _options(kind)),
        paths=tuple(name for name, kind in kinds.items() if Path in _options(kind)),
    )


def _meta(kind: Any) -> Meta | None:
    for option in _options(kind):
        if typing.get_origin(option) is Annotated:
            return next((one for one in typing.get_args(option)[1:] if isinstance(one, Meta)), None)
        if typing.get_origin(option) is tuple:
            return _meta(typing.get_args(option)[0])
    return None


def _options(kind: Any) -> tuple[Any, ...]:
    is_union = isinstance(kind, types.UnionType) or typing.get_origin(kind) is typing.Union
    return typing.get_args(kind) if is_union else (kind,)
