# SPDX-License-Identifier: Apache-2.0
"""An instance that sends what is no message is lost at once, not after a silence."""

import asyncio
import functools
from typing import Any
from unittest import mock

import msgspec
import pytest

from seer.hosting.channel import HEAD, MAX_FRAME_BYTES, BadFrame, Channel, frame
from seer.hosting.messages import CallResult, Up
from seer.hosting.open_calls import OpenCalls
from seer.hosting.process import ProcessInstance


def a_channel(data: bytes) -> Channel[Any]:
    reader = asyncio.StreamReader()
    reader.feed_data(data)
    reader.feed_eof()
    return Channel(reader, mock.Mock(), msgspec.msgpack.Decoder(Up), 0)


async def receive(data: bytes) -> Any:
    return await a_channel(data).receive()


@pytest.mark.parametrize(
    "data",
    [frame("no message"), frame({"type": "News"}), HEAD.pack(3, 0) + b"abc", HEAD.pack(MAX_FRAME_BYTES + 1, 0)],
)
def test_what_is_no_message_is_a_bad_frame(data: bytes) -> None:
    with pytest.raises(BadFrame, match="a frame"):
        asyncio.run(receive(data))


def test_a_frame_that_was_cut_off_is_the_end() -> None:
    assert asyncio.run(receive(frame(CallResult(1))[:-1])) is None
    assert asyncio.run(receive(frame(CallResult(1)))) == CallResult(1)


def test_an_instance_that_sends_a_bad_frame_is_lost() -> None:
    async def read() -> mock.Mock:
        instance = mock.Mock(_calls=OpenCalls(), _now_s=lambda: 0.0)
        instance._take_messages = functools.partial(ProcessInstance._take_messages, instance)
        await ProcessInstance._read(instance, a_channel(frame(CallResult(1)) + frame("no message", 1)))
        return instance

    lost = asyncio.run(read())
    lost._lose.assert_called_once()
    assert "no message" in lost._lose.call_args.args[0]
