# SPDX-License-Identifier: Apache-2.0
"""Frames that come twice, early, late or not at all."""

from __future__ import annotations

import asyncio
import random
import socket

import msgspec
import pytest

from seer.hosting.channel import MAX_EARLY_FRAMES, Channel, frame

_decoder = msgspec.msgpack.Decoder(int)


def received(frames: list[bytes], *, is_over: bool = True) -> tuple[list[int], bool]:
    """The messages that a channel makes of these frames, and whether it missed one."""

    async def scenario() -> tuple[list[int], bool]:
        ours, theirs = socket.socketpair()
        channel = await Channel.over(ours, _decoder)
        with theirs:
            theirs.sendall(b"".join(frames))
            if is_over:
                theirs.shutdown(socket.SHUT_WR)
            messages = []
            while (message := await channel.receive()) is not None:
                messages.append(message)
        await channel.close()
        return messages, channel.lost_a_frame

    return asyncio.run(scenario())


@pytest.mark.parametrize("seed", range(20))
def test_messages_are_received_once_and_in_order_however_their_frames_come(seed: int) -> None:
    rng = random.Random(seed)
    numbers = list(range(100))
    for start in range(0, 100, MAX_EARLY_FRAMES):
        block = numbers[start : start + MAX_EARLY_FRAMES]
        rng.shuffle(block)
        numbers[start : start + MAX_EARLY_FRAMES] = block
    frames = [frame(number, number) for number in numbers for _ in range(rng.choice([1, 1, 2]))]
    assert received(frames) == (list(range(100)), False)


def test_a_lost_frame_ends_the_channel_and_nothing_after_it_is_received() -> None:
    frames = [frame(number, number) for number in range(100) if number != 5]
    assert received(frames, is_over=False) == ([0, 1, 2, 3, 4], True)


def test_a_channel_that_sends_numbers_its_frames() -> None:
    async def scenario() -> list[int | None]:
        ours, theirs = socket.socketpair()
        one, two = await Channel.over(ours, _decoder), await Channel.over(theirs, _decoder)
        for number in range(3):
            one.send(number)
        messages = [await two.receive() for _ in range(3)]
        await one.close()
        messages.append(await two.receive())
        await two.close()
        return messages

    assert asyncio.run(scenario()) == [0, 1, 2, None]
