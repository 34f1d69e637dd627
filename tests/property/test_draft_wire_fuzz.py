# SPDX-License-Identifier: Apache-2.0
"""Bad input on the wire gets an error, never a crash."""

import contextlib
from typing import Any

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from seer.drafting.log import LogStore
from seer.drafting.server import answer
from seer.drafting.wire import VERSION, Drop, Fetch, Known, Push, Register, Reply, Tail, WireError, decode, encode

u64 = st.integers(0, 2**64 - 1)
tokens = st.lists(st.integers(0, 2**31 - 1), max_size=20).map(
    lambda numbers: b"".join(number.to_bytes(4, "little") for number in numbers)
)
tails = st.builds(Tail, u64, u64, st.integers(0, 2**31 - 100), tokens)
messages = st.one_of(
    st.builds(Push, u64, u64, st.lists(tails, max_size=5)),
    st.builds(Register, u64, u64, st.lists(u64, max_size=5), st.floats(0.001, 1e9)),
    st.builds(Drop, u64, u64, st.lists(u64, max_size=5)),
    st.builds(
        Fetch,
        u64,
        u64,
        st.lists(
            st.integers(0, 4).flatmap(
                lambda n: st.builds(
                    Known,
                    u64,
                    u64,
                    st.binary(min_size=8 * n, max_size=8 * n),
                    st.binary(min_size=4 * n, max_size=4 * n),
                )
            ),
            max_size=4,
        ),
    ),
)
junk: st.SearchStrategy[Any] = st.recursive(
    st.one_of(st.none(), st.booleans(), st.integers(-(2**63), 2**64 - 1), st.floats(), st.text(), st.binary()),
    lambda inner: st.lists(inner, max_size=6),
    max_leaves=20,
)
names = st.sampled_from(["push", "fetch", "register", "drop", "ask", "pushed", "fetched", "done", "status", "nonsense"])


def feed(store: LogStore, frame: bytes) -> None:
    with contextlib.suppress(WireError):
        assert isinstance(answer(store, 1, decode(frame), now=0.0), Reply)


@given(messages)
def test_a_message_survives_the_wire(message: Any) -> None:
    assert decode(encode(message)) == message


@given(st.binary(max_size=300))
def test_random_bytes_are_refused(frame: bytes) -> None:
    feed(LogStore(), frame)
    feed(LogStore(), VERSION + frame)


@given(names, st.lists(junk, max_size=7))
@settings(max_examples=300)
def test_well_formed_nonsense_is_refused_or_answered(name: str, fields: list[Any]) -> None:
    feed(LogStore(), VERSION + msgspec.msgpack.encode([name, *fields]))


@given(st.lists(messages, min_size=1, max_size=6), st.data())
def test_a_damaged_message_is_refused_or_answered(sent: list[Any], data: st.DataObject) -> None:
    store = LogStore()
    for message in sent:
        frame = bytearray(encode(message))
        for _ in range(data.draw(st.integers(0, 3))):
            frame[data.draw(st.integers(0, len(frame) - 1))] = data.draw(st.integers(0, 255))
        feed(store, bytes(frame[: data.draw(st.integers(0, len(frame)))]))
        feed(store, bytes(frame))


@pytest.mark.parametrize(
    "message",
    [
        Push(1, 1, [Tail(1, 1, 0, b"abc")]),
        Push(1, 1, [Tail(1, 1, 0, b"\xff\xff\xff\xff")]),
        Push(1, 1, [Tail(1, 1, 2**31 - 1, b"\0\0\0\0")]),
        Fetch(1, 1, [Known(1, 1, bytes(8), bytes(8))]),
        Fetch(1, 1, [Known(1, 1, bytes(7), bytes(3))]),
    ],
    ids=["odd bytes", "negative token", "endless stream", "more lengths than streams", "odd arrays"],
)
def test_arrays_that_do_not_fit_are_refused(message: Any) -> None:
    with pytest.raises(WireError):
        decode(encode(message))


@given(messages, st.binary(min_size=2, max_size=2).filter(lambda version: version != VERSION))
def test_another_version_of_the_protocol_is_refused(message: Any, version: bytes) -> None:
    with pytest.raises(WireError):
        decode(version + encode(message)[len(VERSION) :])
