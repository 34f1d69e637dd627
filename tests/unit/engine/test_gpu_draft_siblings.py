# SPDX-License-Identifier: Apache-2.0
"""Tokens of siblings reach an engine that does not run them, through a real draft server on loopback."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Iterator
from typing import Any

import msgspec
import pytest

from chunk_facts_cases import GOOD
from draft_servers import CLIENT_KEYS, DEADLINE_S, serving
from seer.drafting.ids import number_of
from seer.engine.vllm.chunk_facts import ChunkFacts
from seer.engine.vllm.gpu_drafts import siblings
from seer.engine.vllm.gpu_drafts.siblings import Siblings

PROMPT = [1, 2, 3]
MAX_MODEL_LEN = 100


class ARequest:
    """What the exchange reads of vLLM's request."""

    def __init__(self, name: str, response: list[int] | None = None) -> None:
        self.request_id = name
        self.all_token_ids = PROMPT + (response or [])
        self.num_prompt_tokens = len(self.all_token_ids)
        self.has_ended = False

    @property
    def num_tokens(self) -> int:
        return len(self.all_token_ids)

    def is_finished(self) -> bool:
        return self.has_ended


@contextlib.contextmanager
def two_engines() -> Iterator[tuple[Siblings, Siblings]]:
    with serving() as address:
        engines = Siblings([address], CLIENT_KEYS, MAX_MODEL_LEN), Siblings([address], CLIENT_KEYS, MAX_MODEL_LEN)
        try:
            yield engines
        finally:
            for engine in engines:
                engine.close()


def facts(
    request: int,
    group: int,
    *,
    left: int = 50,
    run: str = "run",
    weights_version: int = 0,
    ended_groups: tuple[int, ...] = (),
) -> ChunkFacts:
    given = {"request": request, "group": group, "run": run, "weights_version": weights_version, "max_left": left}
    return msgspec.convert(GOOD | given | {"ended_groups": ended_groups}, ChunkFacts)


def settle(*engines: Siblings) -> None:
    """Everything sent has arrived, and everything that arrived was collected."""
    for _ in range(2):
        for engine in engines:
            engine.exchange()
            assert engine._client.flush(DEADLINE_S)
    for engine in engines:
        engine.exchange()


def received(engine: Siblings) -> dict[tuple[object, int], list[int]]:
    """All that the workers got, put together; each tail continues where the last one ended."""
    streams: dict[tuple[object, int], list[int]] = {}
    for tail in engine.take():
        held = streams.setdefault((tail.group, tail.stream), [])
        assert tail.start == len(held)
        held += tail.tokens.tolist()
    return streams


def test_each_engine_gets_the_tokens_of_its_groups_that_the_other_runs() -> None:
    with two_engines() as (here, there):
        mine, sibling, stranger = ARequest("0.1"), ARequest("1.1"), ARequest("2.1")
        here.track(mine, facts(0, 5))  # type: ignore[arg-type]
        there.track(sibling, facts(1, 5))  # type: ignore[arg-type]
        there.track(stranger, facts(2, 6))  # type: ignore[arg-type]
        mine.all_token_ids += [10, 11]
        sibling.all_token_ids += [20, 21, 22]
        stranger.all_token_ids += [30]
        settle(here, there)
        sibling.all_token_ids += [23]
        settle(here, there)
        assert list(received(here).values()) == [[20, 21, 22, 23]], "not its own, not of a group it does not run"
        assert list(received(there).values()) == [[10, 11]]
        assert here.take() == []


def test_a_request_that_moved_on_continues_behind_what_the_engine_has() -> None:
    with two_engines() as (here, there):
        mine, first = ARequest("0.1"), ARequest("1.1")
        here.track(mine, facts(0, 5))  # type: ignore[arg-type]
        here.track(first, facts(1, 5))  # type: ignore[arg-type]
        mine.all_token_ids += [9]
        first.all_token_ids += [20, 21]
        first.has_ended = True
        settle(here)
        second = ARequest("1.2", [20, 21])
        there.track(second, facts(1, 5, left=48))  # type: ignore[arg-type]
        second.all_token_ids += [22]
        settle(here, there)
        (tail,) = here.take()
        assert (tail.start, tail.tokens.tolist(), tail.max_tokens) == (2, [22], 50)


def test_a_group_that_ended_is_dropped_when_the_next_request_names_it() -> None:
    with two_engines() as (here, there):
        mine, sibling = ARequest("0.1"), ARequest("1.1")
        here.track(mine, facts(0, 5))  # type: ignore[arg-type]
        there.track(sibling, facts(1, 5))  # type: ignore[arg-type]
        mine.all_token_ids += [10]
        sibling.all_token_ids += [20]
        settle(here, there)
        group = number_of("run/5")
        assert len(list(here._client.index.requests(group))) == 2
        assert len(here._handed) == 1
        mine.has_ended = sibling.has_ended = True
        here.exchange()
        here.track(ARequest("2.1"), facts(2, 6, ended_groups=(5,)))  # type: ignore[arg-type]
        here.exchange()
        assert list(here._client.index.requests(group)) == []
        assert here._handed == {}


def test_a_new_run_begins_with_nothing() -> None:
    with two_engines() as (here, there):
        for run, version in (("first", 0), ("second", 1)):
            mine, sibling = ARequest("0.1"), ARequest("1.1")
            here.track(mine, facts(0, 5, run=run, weights_version=version))  # type: ignore[arg-type]
            there.track(sibling, facts(1, 5, run=run, weights_version=version))  # type: ignore[arg-type]
            mine.all_token_ids += [1]
            sibling.all_token_ids += [40 + version]
            settle(here, there)
            assert list(received(here).values()) == [[40 + version]]


def test_no_response_is_given_more_room_than_the_model_has() -> None:
    with two_engines() as (here, there):
        mine, sibling = ARequest("0.1"), ARequest("1.1")
        here.track(mine, facts(0, 5, left=2**31 - 1))  # type: ignore[arg-type]
        there.track(sibling, facts(1, 5))  # type: ignore[arg-type]
        mine.all_token_ids += [10]
        sibling.all_token_ids += [20]
        settle(here, there)
        (tail,) = here.take()
        assert tail.max_tokens == MAX_MODEL_LEN - len(PROMPT)


def test_one_step_carries_a_bounded_number_of_tokens(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(siblings, "TAKE_TOKENS", 3)
    with two_engines() as (here, there):
        here.track(ARequest("0.1", [1]), facts(0, 5))  # type: ignore[arg-type]
        for number in (1, 2, 3):
            there.track(ARequest(f"{number}.1", [number] * 2), facts(number, 5))  # type: ignore[arg-type]
        settle(here, there)
        assert [sum(len(tail.tokens) for tail in here.take()) for _ in range(3)] == [4, 2, 0]


def test_the_thread_collects_until_it_is_closed() -> None:
    with two_engines() as (here, there):
        here.start()
        there.track(ARequest("1.1", [20]), facts(1, 5))  # type: ignore[arg-type]
        settle(there)
        exchanged, exchange = threading.Event(), here.exchange
        arrived: list[Any] = []

        def watched() -> None:
            exchange()
            arrived.extend(here.take())
            if arrived:
                exchanged.set()

        here.exchange = watched  # type: ignore[method-assign]
        here.track(ARequest("0.1", [1]), facts(0, 5))  # type: ignore[arg-type]
        assert exchanged.wait(DEADLINE_S)
        assert [tail.tokens.tolist() for tail in arrived] == [[20]]
        here.close()
        assert not here._thread.is_alive()
