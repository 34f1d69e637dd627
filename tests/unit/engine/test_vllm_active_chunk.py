# SPDX-License-Identifier: Apache-2.0
"""What vLLM's outputs mean for a chunk: how it ends, and that every token is reported once."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

pytest.importorskip("torch")

from engines import a_chunk
from seer.engine.stop_strings import StopStrings
from seer.types import ChunkEnd, ChunkOutput
from vllm_engines import needs_vllm

pytestmark = needs_vllm


def active(max_tokens: int = 4, **sampling: Any) -> Any:
    """A chunk whose tokens are letters, the first one `a`."""
    from seer.engine.vllm.active_chunk import ActiveChunk

    made = ActiveChunk(a_chunk(0, [1], max_tokens=max_tokens, logprobs=False, **sampling), "0.1", max_tokens)
    if sampling.get("stop"):
        made._stops = StopStrings(lambda ids: "".join(chr(ord("a") + one) for one in ids), sampling["stop"])
    return made


def take(one: Any, ids: list[int], reason: str | None = None, stop_token: int | None = None) -> ChunkOutput | None:
    output = SimpleNamespace(token_ids=ids, logprobs=_flat(), finish_reason=reason, stop_reason=stop_token)
    found: ChunkOutput | None = one.take(output, instance=3, vocab_size=26)
    return found


def _flat() -> Any:
    from vllm.logprobs import FlatLogprobs

    return FlatLogprobs()


def ids_and_end(output: ChunkOutput | None) -> tuple[list[int], ChunkEnd | None]:
    assert output is not None
    return list(output.span.ids) if output.span is not None else [], output.end


def test_a_limit_before_the_lease_is_used_up_is_a_park_if_it_was_asked_for() -> None:
    for is_parked, num_tokens, end in (
        (True, 3, ChunkEnd.PARKED),
        (True, 4, ChunkEnd.LIMIT),
        (False, 3, ChunkEnd.LIMIT),
    ):
        one = active(max_tokens=4)
        one.is_parked = is_parked
        assert ids_and_end(take(one, [5])) == ([5], None)
        assert ids_and_end(take(one, [6] * (num_tokens - 1), "length")) == ([6] * (num_tokens - 1), end)
        assert one.num_reported == num_tokens


def test_an_output_that_says_nothing_is_not_reported() -> None:
    one = active()
    assert take(one, []) is None
    assert ids_and_end(take(one, [], "abort")) == ([], ChunkEnd.ABORTED)


def test_tokens_after_a_stop_string_are_not_reported_however_vllm_ended() -> None:
    for reason in (None, "length"):
        one = active(max_tokens=8, stop=("cd",))
        assert ids_and_end(take(one, [0, 2])) == ([0, 2], None)
        assert ids_and_end(take(one, [3, 4, 5], reason)) == ([3], ChunkEnd.STOP)
        assert (one.is_stopped, one.num_reported) == (True, 3)


def test_a_stop_string_before_min_tokens_ends_nothing() -> None:
    one = active(max_tokens=8, stop=("cd",), min_tokens=3)
    assert ids_and_end(take(one, [2, 3])) == ([2, 3], None)
    assert ids_and_end(take(one, [2, 3])) == ([2, 3], ChunkEnd.STOP)


def test_a_stop_token_is_named_also_where_it_completes_a_stop_string_but_not_after_one() -> None:
    for string, ids, stop_token in (("cd", [0, 2, 3], 3), ("ac", [0, 2], None)):
        output = take(active(max_tokens=8, stop=(string,), stop_token_ids=(3,)), [0, 2, 3], "stop", stop_token=3)
        assert output is not None
        assert (*ids_and_end(output), output.stop_token) == (ids, ChunkEnd.STOP, stop_token)
