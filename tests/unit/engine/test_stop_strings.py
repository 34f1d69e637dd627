# SPDX-License-Identifier: Apache-2.0
"""Stop strings: a turn ends with the token that completes one, whatever the chunks, drafts and turns before it."""

from __future__ import annotations

import random
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

torch = pytest.importorskip("torch")

from chat_models import CHATML, make_tokenizer
from engines import Generated, a_chunk, always, an_engine, generate, knowing
from seer.engine.local.engine import Engine
from seer.engine.local.tiny import make_tiny_model
from seer.engine.local.tokenizer import decoder
from seer.engine.stop_strings import StopStrings
from seer.errors import ConfigError
from seer.types import ChunkEnd, Sampling, TokenSpan

PROMPT = [11, 45, 3, 99, 27, 64, 80]
WORDS = ["<", "/", "tool", "_call", ">", "</", "call>", "a", " b", "</tool_call>", "x</tool_call>y"]
STOP = "</tool_call>"


def words(ids: Sequence[int]) -> str:
    return "".join(WORDS[token] for token in ids)


def first_end(turn: Sequence[int]) -> int | None:
    """By the definition: the shortest beginning of the turn whose text has the string."""
    return next((end for end in range(1, len(turn) + 1) if STOP in words(turn[:end])), None)


def test_where_a_turn_ends_does_not_depend_on_how_many_tokens_come_at_once() -> None:
    dice = random.Random(1)
    num_found = 0
    for _ in range(300):
        turn = [dice.randrange(len(WORDS) - (dice.random() < 0.8) * 2) for _ in range(40)]
        stops = StopStrings(words, ["never", STOP])
        at, found = 0, None
        while at < len(turn) and found is None:
            new = min(dice.randint(1, 9), len(turn) - at)
            until = stops.find(turn[: at + new], new)
            found = None if until is None else at + until
            at += new
        assert found == first_end(turn)
        num_found += found is not None
    assert 30 < num_found < 290


def test_a_string_may_end_with_a_character_of_several_tokens() -> None:
    def text(ids: Sequence[int]) -> str:
        return bytes(ids).decode("utf-8", "replace")

    for stop in ("\N{EURO SIGN}", "n\N{EURO SIGN}", "\N{GRINNING FACE}"):
        turn = list(f"x{stop}y".encode())
        stops = StopStrings(text, [stop])
        assert stops.find(turn, len(turn)) == len(turn) - 1
        assert stops.completed(turn[:-1]) == (stop, len(stop))


def test_a_string_that_is_complete_too_early_ends_nothing_later() -> None:
    stops = StopStrings(words, [STOP])
    turn = [9, 7, 7, 9, 7]
    assert stops.find(turn, 5, num_free=1) == 4
    assert stops.find(turn[:3], 2) is None  # it is in the tokens before the new ones
    assert stops.find(turn, 5, num_free=4) is None


def test_empty_and_single_strings_are_refused() -> None:
    assert Sampling(max_tokens=5, stop=("a",)).stop == ("a",)
    for bad in ("a", ("",), (3,)):
        with pytest.raises(ConfigError, match="stop"):
            Sampling(max_tokens=5, stop=bad)  # type: ignore[arg-type]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    model = make_tiny_model(tmp_path_factory.mktemp("model"), seed=5, vocab_size=262)
    make_tokenizer(model, CHATML, eos="<|im_end|>")
    return model


@pytest.fixture(scope="module")
def free(folder: Path) -> Generated:
    return generate(an_engine(folder), [a_chunk(0, PROMPT, max_tokens=80)])[0]


def a_stop(folder: Path, ids: Sequence[int], start: int) -> tuple[str, int]:
    """Two letters that the model generates after `start`, and the number of tokens with which they are complete."""
    decode = decoder(folder)
    for end in range(start + 2, len(ids)):
        text = decode(ids[end - 2 : end])
        if text.isascii() and text.isprintable() and text not in decode(ids[: end - 1]):
            return text, end
    raise AssertionError("no two letters in a row")


def with_stop(engine: Engine, stop: str, chunk_tokens: int = 80, **settings: Any) -> Generated:
    """The same response in chunks of so many tokens."""
    whole = Generated()
    while whole.end is not ChunkEnd.STOP and len(whole.ids) < 80:
        spans = (whole.span(),) if whole.ids else ()
        part = generate(engine, [a_chunk(0, PROMPT, max_tokens=chunk_tokens, spans=spans, stop=(stop,), **settings)])[0]
        whole.ids += part.ids
        whole.logprobs += part.logprobs
        whole.raw_logprobs += part.raw_logprobs
        whole.end, whole.stop_token = part.end, part.stop_token
    return whole


@pytest.mark.parametrize("chunk_tokens", [80, 3, 1])
@pytest.mark.parametrize("has_drafts", [False, True])
def test_a_response_ends_with_the_token_that_completes_the_string(
    folder: Path, free: Generated, chunk_tokens: int, has_drafts: bool
) -> None:
    stop, end = a_stop(folder, free.ids, 20)
    drafts: dict[str, Any] = {"drafter": knowing({0: free.ids}, tree=True), "budget": always(6)} if has_drafts else {}
    found = with_stop(an_engine(folder, **drafts), stop, chunk_tokens)
    assert (found.ids, found.logprobs) == (free.ids[:end], free.logprobs[:end])
    assert (found.end, found.stop_token) == (ChunkEnd.STOP, None)


def test_a_string_counts_from_min_tokens_on(folder: Path, free: Generated) -> None:
    stop, end = a_stop(folder, free.ids, 20)
    late = with_stop(an_engine(folder), stop, min_tokens=end)
    assert late.ids[:end] == free.ids[:end]
    assert len(late.ids) > end


def test_a_string_counts_only_in_what_was_generated_since_the_turn_began(folder: Path, free: Generated) -> None:
    """The tool's answer ends with the first letter of the string, and the model goes on with the second."""
    engine, before, decode = an_engine(folder), TokenSpan(free.ids[:5], free.logprobs[:5], 0), decoder(folder)
    for token in range(70, 130):
        spans = (before, TokenSpan([13, token], (), 0, is_given=True))
        answer = generate(engine, [a_chunk(0, PROMPT, max_tokens=2, spans=spans)])[0]
        stop = decode([token, answer.ids[0]])
        if len(stop) == 2 and stop.isascii() and stop.isprintable():
            break
    else:
        raise AssertionError("no two letters in a row")
    chunk = a_chunk(0, PROMPT, max_tokens=2, spans=spans, stop=(stop,))
    assert chunk.turn_start == 5
    assert generate(engine, [chunk])[0].ids == answer.ids
    by_its_own = a_chunk(0, PROMPT, max_tokens=2, spans=spans, stop=(stop[1],))
    assert generate(engine, [by_its_own])[0].ids == answer.ids[:1]
    # Of the seven tokens so far the model generated five: `min_tokens` is reached with the second.
    too_early = a_chunk(0, PROMPT, max_tokens=2, spans=spans, stop=(stop[1],), min_tokens=7)
    assert generate(engine, [too_early])[0].ids == answer.ids
