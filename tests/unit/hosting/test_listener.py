# SPDX-License-Identifier: Apache-2.0
"""Processes that dial in: those that are awaited, and everything else that finds the port."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import ssl
from collections.abc import Awaitable, Callable
from dataclasses import replace
from typing import Any
from unittest import mock

import msgspec
import pytest

from dialled import HERE
from seer.config import HostingConfig
from seer.engine.prepare import InstanceSpec
from seer.errors import DeadlineExceeded, InputError, InstanceError
from seer.hosting.channel import HEAD, BadFrame, frame
from seer.hosting.devices import InstanceDevices
from seer.hosting.launcher import DialLauncher
from seer.hosting.messages import CallResult, Ping
from seer.hosting.remote import handshake, listener
from seer.hosting.remote.certificate import make_certificate
from seer.hosting.remote.clock import offset_of
from seer.hosting.remote.dial import Dial, connect, is_loopback
from seer.hosting.remote.handshake import MAX_MESSAGE_BYTES, Challenge, Introduction
from seer.hosting.remote.listener import Connection, Listener
from seer.hosting.serving import DECODER

DEADLINE_S = 30.0
Scenario = Callable[[Listener], Awaitable[None]]


def play(scenario: Scenario, *, encrypted: bool = False) -> None:
    async def main() -> None:
        at = Listener(HERE, encrypted=encrypted)
        await at.start()
        try:
            async with asyncio.timeout(DEADLINE_S):
                await scenario(at)
        finally:
            await at.close()

    asyncio.run(main())


async def shake_hands(at: Listener) -> tuple[Any, Connection]:
    """The channel of a process that was awaited, and the driver's connection to it."""
    dial, come = at.expect()
    return await connect(dial, DECODER), await come


@pytest.mark.parametrize("encrypted", [False, True])
def test_a_process_that_is_awaited_gets_a_channel_in_both_directions(encrypted: bool) -> None:
    async def scenario(at: Listener) -> None:
        theirs, ours = await shake_hands(at)
        assert (theirs.socket.getpeername()[1], ours.clock.offset_s) == (at.port, 0.0), "one machine has one clock"
        ours.channel.send(Ping())
        assert await theirs.receive() == Ping()
        theirs.send(CallResult(3))
        assert await ours.channel.receive() == CallResult(3)
        await asyncio.gather(theirs.close(), ours.channel.close())

    play(scenario, encrypted=encrypted)


def test_what_goes_between_machines_cannot_be_read_on_the_way() -> None:
    """The bytes of a connection, as a relay in between sees them."""
    seen = bytearray()

    async def scenario(at: Listener) -> None:
        relay = await asyncio.start_server(lambda *near: _relay(at.port, seen, *near), HERE, 0)
        dial, come = at.expect()
        theirs = await connect(replace(dial, port=relay.sockets[0].getsockname()[1]), DECODER)
        theirs.send(CallResult(1, error="a secret sentence"))
        ours = (await come).channel
        assert await ours.receive() == CallResult(1, error="a secret sentence")
        relay.close()
        await asyncio.gather(theirs.close(), ours.close())

    play(scenario, encrypted=True)
    assert len(seen) > 500
    assert b"secret sentence" not in seen
    assert b"Introduction" not in seen


async def _relay(port: int, seen: bytearray, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    far_reader, far_writer = await asyncio.open_connection(HERE, port)

    async def pass_on(source: asyncio.StreamReader, target: asyncio.StreamWriter) -> None:
        while part := await source.read(1 << 16):
            seen.extend(part)
            target.write(part)
        target.close()

    await asyncio.gather(pass_on(reader, far_writer), pass_on(far_reader, writer), return_exceptions=True)
    for one in (writer, far_writer):
        one.transport.abort()


def test_a_process_whose_start_was_given_up_as_it_came_is_hung_up_on() -> None:
    async def scenario(at: Listener) -> None:
        dials: list[Dial] = []

        async def start(id: int, dial: Dial) -> None:
            (come,) = [come for _, come in at._awaited.values()]
            come.add_done_callback(lambda _: launching.cancel())  # before the launch goes on
            dials.append(dial)

        launcher = DialLauncher(at, start)
        spec = InstanceSpec(factory="", settings={})
        launching = asyncio.create_task(launcher.launch(0, spec, InstanceDevices(), HostingConfig()))
        while not dials:  # noqa: ASYNC110 - a few turns of the event loop
            await asyncio.sleep(0)
        theirs = await connect(dials[0], DECODER)
        with pytest.raises(asyncio.CancelledError):
            await launching
        assert await theirs.receive() is None
        await theirs.close()

    play(scenario)


@pytest.mark.parametrize("change", [{"secret": b"x" * 32}, {"launch": "another"}])
def test_a_process_without_the_secret_is_dropped_and_the_right_one_still_gets_in(change: dict[str, Any]) -> None:
    async def scenario(at: Listener) -> None:
        dial, come = at.expect()
        with pytest.raises(InstanceError, match="cannot be reached"):
            await connect(replace(dial, **change), DECODER)
        assert not come.done()
        channel = await connect(dial, DECODER)
        await (await come).channel.close()
        await channel.close()

    play(scenario)


def test_a_connection_that_does_not_close_is_dropped_and_may_be_closed_again(monkeypatch: pytest.MonkeyPatch) -> None:
    """As over a cut link: the other side says no goodbye, and the first that closes is cancelled."""
    monkeypatch.setattr("seer.hosting.channel.CLOSE_DEADLINE_S", 0.05)

    async def scenario(at: Listener) -> None:
        theirs, ours = await shake_hands(at)
        usual = ours.channel._writer.transport
        monkeypatch.setattr(ours.channel._writer, "close", lambda: None)  # no goodbye comes, so nothing is closed
        first = asyncio.create_task(ours.channel.close())
        await asyncio.sleep(0.01)
        first.cancel()
        await asyncio.gather(first, return_exceptions=True)
        await ours.channel.close()
        await ours.channel.close()
        assert usual.is_closing()
        await theirs.close()

    play(scenario, encrypted=True)


def test_a_launch_is_handed_out_once() -> None:
    async def scenario(at: Listener) -> None:
        dial, come = at.expect()
        first = await connect(dial, DECODER)
        ours = (await come).channel
        with pytest.raises(InstanceError):
            await connect(dial, DECODER)
        await asyncio.gather(first.close(), ours.close())

    play(scenario)


def test_a_listener_that_does_not_know_the_secret_is_no_driver() -> None:
    async def scenario(at: Listener) -> None:
        dial, _ = at.expect()
        at._awaited[dial.launch] = (b"another", at._awaited[dial.launch][1])  # it lets everyone in
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr("seer.hosting.remote.handshake.hmac.compare_digest", _lets_first_in())
            with pytest.raises(InstanceError, match="it is not the driver"):
                await connect(dial, DECODER)

    play(scenario)


def _lets_first_in() -> Callable[[bytes, bytes], bool]:
    """A comparison that is true for the driver, which compares first, and honest for the instance."""
    asked = iter([True])
    return lambda one, other: next(asked, one == other)


def test_a_certificate_that_is_not_the_drivers_is_refused() -> None:
    async def scenario(at: Listener) -> None:
        dial, come = at.expect()
        other = make_certificate().pem
        with pytest.raises(InstanceError, match="certificate verify failed"):
            await connect(replace(dial, certificate=other), DECODER)
        assert not come.done()

    play(scenario, encrypted=True)


def test_another_version_of_seer_is_named_on_both_sides(monkeypatch: pytest.MonkeyPatch) -> None:
    versions = iter(["0.1.0", "9.9.9"])  # the driver says its own first, then the instance
    monkeypatch.setattr(handshake, "our_version", lambda: next(versions, "0.1.0"))

    async def scenario(at: Listener) -> None:
        dial, come = at.expect()
        with pytest.raises(InstanceError, match=r"it has Seer 9.9.9, the driver 0.1.0; install one version"):
            await connect(dial, DECODER)
        with pytest.raises(InstanceError, match=r"it has Seer 9.9.9, the driver 0.1.0"):
            await come

    play(scenario)


async def say(at: Listener, data: bytes) -> bytes:
    """What the driver sends to a peer that says this."""
    reader, writer = await asyncio.open_connection(at.host, at.port)
    writer.write(data)
    answer = b""
    with contextlib.suppress(ConnectionError):
        answer = await reader.read()
    writer.close()
    return answer


HOSTILE = {
    "nothing that is a frame": b"GET / HTTP/1.1\r\n\r\n" * 10,
    "a frame of a gigabyte": HEAD.pack(1 << 30, 0),
    "a frame just too long": HEAD.pack(MAX_MESSAGE_BYTES + 1, 0) + bytes(MAX_MESSAGE_BYTES + 1),
    "a frame that is no message": frame("hello"),
    "a message of another kind": frame(Challenge("1", b"")),
    "the time before its name": frame(handshake.Time(1.0)),
    "an empty introduction": frame(Introduction("", "", b"", b"")),
    "deep nesting": HEAD.pack(1000, 0) + b"\x91" * 1000,
    "noise": os.urandom(5000),
}


@pytest.mark.parametrize("data", HOSTILE.values(), ids=HOSTILE)
def test_what_a_stranger_says_ends_its_connection_and_nothing_else(data: bytes) -> None:
    async def scenario(at: Listener) -> None:
        answer = await say(at, data)
        assert len(answer) < MAX_MESSAGE_BYTES
        theirs, ours = await shake_hands(at)
        await asyncio.gather(theirs.close(), ours.channel.close())

    play(scenario)


@pytest.mark.parametrize("length", [MAX_MESSAGE_BYTES + 1, 1 << 30])
def test_nothing_is_read_of_a_first_message_that_is_too_long(length: int) -> None:
    async def scenario() -> None:
        reader = asyncio.StreamReader()
        reader.feed_data(HEAD.pack(length, 0))
        with pytest.raises(BadFrame, match=f"a first message of {length} bytes"):
            await handshake.welcome(reader, mock.Mock(), {})

    asyncio.run(asyncio.wait_for(scenario(), 10.0))


def test_plain_text_to_an_encrypted_port_ends_its_connection_and_nothing_else() -> None:
    async def scenario(at: Listener) -> None:
        await say(at, frame(Introduction("1", "launch", b"", b"")))
        theirs, ours = await shake_hands(at)
        await asyncio.gather(theirs.close(), ours.channel.close())

    play(scenario, encrypted=True)


def test_silent_strangers_hold_few_handshakes_and_are_dropped(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(listener, "MAX_HANDSHAKES", 3)
    monkeypatch.setattr(listener, "HANDSHAKE_DEADLINE_S", 0.2)

    async def scenario(at: Listener) -> None:
        strangers = [await asyncio.open_connection(at.host, at.port) for _ in range(10)]
        theirs, ours = await shake_hands(at)  # once the strangers before it were dropped
        assert len(at._handshakes) <= 3
        ended = [await reader.read() for reader, _ in strangers]
        assert all(len(data) < MAX_MESSAGE_BYTES for data in ended)
        for _, writer in strangers:
            writer.close()
        await asyncio.gather(theirs.close(), ours.channel.close())

    play(scenario)


def test_secrets_show_neither_in_text_nor_in_logs(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.DEBUG)
    shown: list[str] = []

    async def scenario(at: Listener) -> None:
        dial, _ = at.expect()
        shown.extend([repr(dial), str(dial), dial.secret.hex(), repr(dial.secret)])
        with pytest.raises(InstanceError):
            await connect(replace(dial, launch="other"), DECODER)

    play(scenario)
    text, secrets = "".join(shown[:2]) + caplog.text, shown[2:]
    assert "dropped" in caplog.text
    assert not any(secret in text for secret in secrets)


def test_a_driver_that_is_not_there_is_said_with_its_address(monkeypatch: pytest.MonkeyPatch) -> None:
    gone = Dial(host=HERE, port=1, launch="x", secret=b"y")
    with pytest.raises(InstanceError, match=r"127\.0\.0\.1:1 cannot be reached") as caught:
        asyncio.run(connect(gone, DECODER))
    assert caught.value.hint is not None

    monkeypatch.setattr("seer.hosting.remote.dial.HANDSHAKE_DEADLINE_S", 0.05)

    ended = asyncio.Event()

    async def sit(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.read()
        writer.transport.abort()
        ended.set()

    async def silent() -> None:
        server = await asyncio.start_server(sit, HERE, 0)
        dial = replace(gone, port=server.sockets[0].getsockname()[1])
        with pytest.raises(DeadlineExceeded, match="the handshake with the driver"):
            await connect(dial, DECODER)
        await ended.wait()
        server.close()
        await server.wait_closed()

    asyncio.run(silent())


def test_an_address_of_another_machine_cannot_be_listened_on() -> None:
    with pytest.raises(InputError, match=r"cannot listen on 203\.0\.113\.9"):
        asyncio.run(Listener("203.0.113.9", encrypted=False).start())


@pytest.mark.parametrize(("host", "is_here"), [("127.0.0.1", True), ("::1", True), ("localhost", True)])
def test_only_loopback_is_not_encrypted(host: str, is_here: bool) -> None:
    assert is_loopback(host) is is_here
    assert not is_loopback("10.0.0.7")
    assert not is_loopback("node-3")
    assert Listener("10.0.0.7")._is_encrypted
    assert not Listener(host)._is_encrypted


def test_the_fastest_probe_says_how_clocks_differ() -> None:
    probes = [(0.0, 500.3, 1.0), (2.0, 502.05, 2.1), (3.0, 503.9, 4.0)]
    clock = offset_of(probes)
    assert clock.offset_s == pytest.approx(500.0)
    assert clock.uncertainty_s == pytest.approx(0.05)
    assert clock.to_ours(502.5) == pytest.approx(2.5)
    assert offset_of([(1.0, 1.04, 1.1)]).offset_s == 0.0, "less than can be told"


def test_tls_is_of_the_newest_version_only() -> None:
    context = make_certificate().context
    assert context.minimum_version is ssl.TLSVersion.TLSv1_3


def test_a_dial_survives_the_way_to_a_process() -> None:
    dial = Dial(host="h", port=5, launch="l", secret=b"s", certificate="c")
    assert msgspec.msgpack.decode(msgspec.msgpack.encode(dial), type=Dial) == dial
