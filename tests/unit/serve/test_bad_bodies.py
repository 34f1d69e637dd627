# SPDX-License-Identifier: Apache-2.0
"""Bad fields of requests, generated over the typed structures: a new field of a known kind is covered by itself."""

from __future__ import annotations

import json
import typing
from collections.abc import Iterator
from typing import Any

import msgspec
import pytest

pytest.importorskip("fastapi")

from bad_values import bad_values
from seer.serve.bodies import decode
from seer.serve.chat import ChatRequest
from seer.serve.completions import CompletionRequest
from seer.serve.refusals import Refusal
from seer.serve.sglang import SglangRequest
from seer.serve.token_generate import GenerateRequest
from seer.serve.weight_endpoints import InitRequest, UpdateRequest

REQUESTS: dict[type[Any], dict[str, Any]] = {
    CompletionRequest: {"prompt": [1]},
    ChatRequest: {"messages": [{"role": "user", "content": "a"}]},
    GenerateRequest: {"token_ids": [1], "sampling_params": {}},
    SglangRequest: {"input_ids": [1], "sampling_params": {}},
    UpdateRequest: {"update_info": {"names": ["a"], "dtype_names": ["float32"], "shapes": [[1]]}},
    InitRequest: {
        "init_info": {"master_address": "127.0.0.1", "master_port": 1, "rank_offset": 1, "world_size": 2},
    },
}


def fields(kind: Any, path: tuple[str, ...] = ()) -> Iterator[tuple[tuple[str, ...], Any]]:
    """Every field that has a type, also of structures in it."""
    hints = typing.get_type_hints(kind, include_extras=True)
    for field in msgspec.structs.fields(kind):
        hint = hints[field.name]
        inner = [
            one for one in (hint, *typing.get_args(hint)) if isinstance(one, type) and issubclass(one, msgspec.Struct)
        ]
        here = (*path, field.encode_name)
        yield from fields(inner[0], here) if inner else [(here, hint)]


GOOD_LISTS: dict[str, list[Any]] = {"stop": ["a"], "prompt": ["a"], "prompt_token_ids": [[]], "shapes": [[]]}
"""What these fields also take, beside what their kind looks like."""


def is_bad(field: str, value: Any) -> bool:
    """Whether this can be sent, as JSON, and must be refused."""
    try:
        json.dumps(value, allow_nan=False)
    except ValueError:
        return False
    return value not in ([], GOOD_LISTS.get(field))


def cases() -> Iterator[tuple[str, type[Any], tuple[str, ...], Any]]:
    for kind in REQUESTS:
        for path, hint in fields(kind):
            for number, value in enumerate(bad_values(hint)):
                if is_bad(path[-1], value):
                    yield f"{kind.__name__}-{'.'.join(path)}-{number}", kind, path, value


CASES = list(cases())


def body(kind: type[Any], path: tuple[str, ...], value: Any) -> bytes:
    whole = json.loads(json.dumps(REQUESTS[kind]))
    place = whole
    for name in path[:-1]:
        place = place.setdefault(name, {})
    place[path[-1]] = value
    return json.dumps(whole).encode()


@pytest.mark.parametrize("kind", REQUESTS)
def test_the_body_without_the_bad_field_is_good(kind: type[Any]) -> None:
    decode(json.dumps(REQUESTS[kind]).encode(), kind)


@pytest.mark.parametrize(("kind", "path", "value"), [case[1:] for case in CASES], ids=[case[0] for case in CASES])
def test_a_bad_field_is_refused_by_its_name(kind: type[Any], path: tuple[str, ...], value: Any) -> None:
    with pytest.raises(Refusal) as caught:
        decode(body(kind, path, value), kind)
    assert caught.value.status == 400
    assert path[-1] in str(caught.value), str(caught.value)
    assert len(str(caught.value)) < 300


def test_there_are_many_of_them() -> None:
    assert len(CASES) > 200
