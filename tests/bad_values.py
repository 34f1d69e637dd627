# SPDX-License-Identifier: Apache-2.0
"""Values that a type must refuse, made from the type alone: a new field of a known kind is covered by itself."""

from __future__ import annotations

import dataclasses
import math
import types
import typing
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec

from seer.ranges import base_type

NOT_A_NUMBER: tuple[Any, ...] = ("many", True, [], {"a": 1}, math.nan, math.inf, -math.inf)
BEYOND_EVERY_RANGE: tuple[Any, ...] = (1 << 64, -(1 << 63) - 1, 10**400)


def bad_values(kind: Any) -> Iterator[Any]:
    """Values that are outside the range of `kind`, or of another type."""
    options = [_without_length(option) for option in _options(kind)]
    accepted = {option if isinstance(option, type) else base_type(option) for option in options}
    meta = next((one for one in map(_meta, options) if one is not None), None)
    if meta is not None and meta.pattern is not None:
        yield from ("", "../up", "a/b", "a\0b", "x" * 65, "a b", 5, True, ["a"], {"a": 1})
    elif meta is not None and meta.min_length is not None:
        yield from ("", "x" * (meta.max_length + 1 if meta.max_length else 1), 5, True, ["a"], {"a": 1}, math.nan)
    elif meta is not None:
        yield from _outside(meta, float in accepted)
        yield from (value for value in NOT_A_NUMBER if not (isinstance(value, list) and list in map(_origin, options)))
        yield from BEYOND_EVERY_RANGE
    elif bool in accepted:
        yield from ("yes", 1, 0.5, [], math.nan)
    elif any(_origin(option) is typing.Literal for option in options):
        yield from ("nonsense", "", 5, ["local"])
    elif str in accepted or Path in accepted:
        yield from (value for value in (5, True, ["a"], {"a": 1}, math.nan) if not (value == 5 and int in accepted))
    elif any(_origin(option) in (tuple, list) for option in options):
        yield from (5, True, {"a": 1}, [[]])
        inner = next(typing.get_args(option)[0] for option in options if _origin(option) in (tuple, list))
        yield from ([value] for value in bad_values(inner))
    elif any(_origin(option) is dict or dataclasses.is_dataclass(option) for option in options):
        yield from (5, "a", [1], math.inf)


def _outside(meta: msgspec.Meta, is_float: bool) -> Iterator[Any]:
    low, high = meta.ge if meta.ge is not None else meta.gt, meta.le
    assert low is not None, f"{meta} has no lower end"
    assert high is not None, f"{meta} has no upper end"
    yield from (low - 1, high + 1)
    if meta.gt is not None:
        yield low
    if not is_float:
        yield low + 0.5


def _meta(kind: Any) -> msgspec.Meta | None:
    if _origin(kind) is not typing.Annotated:
        return None
    return next((one for one in typing.get_args(kind)[1:] if isinstance(one, msgspec.Meta)), None)


def _without_length(kind: Any) -> Any:
    """A text or list of limited length as one of any length: other values of it are bad for another reason."""
    meta = _meta(kind)
    is_length = meta is not None and (meta.min_length is not None or meta.max_length is not None)
    return typing.get_args(kind)[0] if is_length else kind


def _origin(kind: Any) -> Any:
    return typing.get_origin(kind)


def _options(kind: Any) -> tuple[Any, ...]:
    is_union = isinstance(kind, types.UnionType) or typing.get_origin(kind) is typing.Union
    return tuple(option for option in typing.get_args(kind) if option is not type(None)) if is_union else (kind,)
