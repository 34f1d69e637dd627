# SPDX-License-Identifier: Apache-2.0
"""JSON files that others wrote, read into types: one way for every such file.

Invariants
  1. A file that cannot be read, is not JSON, or has a field of another type than the caller's is an `InputError` that
     names the file, the field and what it holds. Fields that the type does not have are left alone.
"""

from __future__ import annotations

import json
import typing
from collections.abc import Mapping
from pathlib import Path
from typing import Any, TypeVar

import msgspec

from seer.errors import ConfigError, InputError
from seer.machine.given_files import MODEL_JSON_BYTES, read_given
from seer.ranges import check

S = TypeVar("S", bound=msgspec.Struct)
UNREADABLE = (msgspec.DecodeError, UnicodeError, RecursionError)
"""What msgspec raises for bytes that are not what a reader expects."""


def read_object(path: Path, *, hint: str | None = None) -> dict[str, Any]:
    """The JSON object in a file."""
    try:
        # Not msgspec: files of models may say Infinity in fields we do not read.
        raw = json.loads(read_given(path, limit_bytes=MODEL_JSON_BYTES))
    except OSError as error:
        raise InputError(f"{path} cannot be read: {error.strerror}", hint=hint) from None
    except (ValueError, RecursionError) as error:
        raise InputError(f"{path} is not JSON: {error}", hint=hint) from None
    if not isinstance(raw, dict):
        raise InputError(f"{path} holds {type(raw).__name__}, not an object", hint=hint)
    return raw


def read_struct(path: Path, kind: type[S], *, hint: str | None = None) -> S:
    """The fields of `kind` from a file."""
    return parse_struct(read_object(path, hint=hint), kind, source=str(path), hint=hint)


def parse_struct(raw: Mapping[str, Any], kind: type[S], *, source: str, hint: str | None = None) -> S:
    """The fields of `kind` from an object; `source` names it in messages."""
    hints = typing.get_type_hints(kind, include_extras=True)
    known = {field.encode_name: field for field in msgspec.structs.fields(kind)}
    try:
        for key, field in known.items():
            if key in raw or field.required:
                check(raw.get(key), hints[field.name], f"{source}: {key}")
        return msgspec.convert({key: raw[key] for key in known if key in raw}, kind)
    except ConfigError as error:
        raise InputError(str(error), hint=hint or error.hint) from None
    except UNREADABLE as error:
        raise InputError(f"{source}: {error}", hint=hint) from None
