# SPDX-License-Identifier: Apache-2.0
"""Who lacks the keys gets nothing into a draft server, nothing out of it, and no tokens from its clients."""

import contextlib
import logging
import socket as sockets
import threading
from collections.abc import Iterator
from urllib.parse import urlsplit

import msgspec
import numpy as np
import pytest
import zmq
from hypothesis import given, settings
from hypothesis import strategies as st
from zmq.utils.monitor import recv_monitor_message

from draft_servers import ANY_PORT, CLIENT_KEYS, DEADLINE_S, SERVER_KEYS, serving
from seer.drafting.client import ClientConfig, DraftClient
from seer.drafting.curve_keys import ClientKeys, ServerKeys, make_keys
from seer.drafting.ids import number_of
from seer.drafting.wire import Ask, Drop, Fetch, Known, Push, Status, Tail, decode, encode, pack_tokens
from seer.errors import ConfigError

_, STRANGER_KEYS = make_keys()

STRANGERS: dict[str, ClientKeys | None] = {
    "no keys": None,
    "an unknown client key": ClientKeys(
        secret_key=STRANGER_KEYS.secret_key, server_public_key=CLIENT_KEYS.server_public_key
    ),
    "another server's public key": ClientKeys(
        secret_key=CLIENT_KEYS.secret_key, server_public_key=STRANGER_KEYS.server_public_key
    ),
}
REFUSALS = (
    zmq.EVENT_HANDSHAKE_FAILED_AUTH
    | zmq.EVENT_HANDSHAKE_FAILED_PROTOCOL
    | zmq.EVENT_HANDSHAKE_FAILED_NO_DETAIL
    | zmq.EVENT_DISCONNECTED
)


@contextlib.contextmanager
def a_socket(address: str, keys: ClientKeys | None) -> Iterator[tuple[zmq.Socket[bytes], zmq.Socket[bytes]]]:
    """A connected socket, and the one that says what became of its handshakes."""
    with zmq.Context() as context, context.socket(zmq.DEALER) as socket:
        socket.setsockopt(zmq.LINGER, 0)
        if keys is not None:
            keys.secure(socket)
        monitor = socket.get_monitor_socket(REFUSALS | zmq.EVENT_HANDSHAKE_SUCCEEDED)
        socket.connect(address)
        try:
            yield socket, monitor
        finally:
            socket.disable_monitor()
            monitor.close()


def handshake(monitor: "zmq.Socket[bytes]") -> int:
    assert monitor.poll(int(DEADLINE_S * 1000)), "no handshake"
    return int(recv_monitor_message(monitor)["event"])


def status(address: str) -> Status:
    with a_socket(address, CLIENT_KEYS) as (socket, _):
        socket.send(encode(Ask(1)))
        assert socket.poll(int(DEADLINE_S * 1000)), "no answer"
        reply = decode(socket.recv())
        assert isinstance(reply, Status)
        return reply


def fill(address: str) -> None:
    client = DraftClient(ClientConfig(servers=(address,), keys=CLIENT_KEYS))
    try:
        client.observe("g", "a", [1, 2, 3])
        assert client.flush(DEADLINE_S)
    finally:
        client.close()


@pytest.mark.parametrize("keys", STRANGERS.values(), ids=STRANGERS)
def test_a_stranger_gets_nothing_in_and_nothing_out(keys: ClientKeys | None) -> None:
    group = number_of("g")
    attacks: list[Push | Fetch | Drop | Ask] = [
        Push(1, 0, [Tail(group, 77, 0, pack_tokens(np.array([9, 9], np.int32)))]),
        Fetch(2, 0, [Known(group, 0, b"", b"")]),
        Drop(3, 0, [group]),
        Ask(4),
    ]
    with serving() as address:
        fill(address)
        before = msgspec.structs.replace(status(address), sequence=0)
        with a_socket(address, keys) as (socket, monitor):
            for attack in attacks:
                socket.send(encode(attack))
            assert handshake(monitor) & REFUSALS
            assert not socket.poll(0), "a stranger was answered"
        assert msgspec.structs.replace(status(address), sequence=0) == before
        assert before.tokens == 3


def test_the_known_key_is_let_in() -> None:
    with serving() as address, a_socket(address, CLIENT_KEYS) as (_, monitor):
        assert handshake(monitor) == zmq.EVENT_HANDSHAKE_SUCCEEDED


@pytest.mark.parametrize("keys", STRANGERS.values(), ids=STRANGERS)
def test_a_client_without_the_keys_says_so_once_and_drafts_from_its_own_history(
    keys: ClientKeys | None, caplog: pytest.LogCaptureFixture
) -> None:
    warned = threading.Event()
    handler = logging.Handler(logging.WARNING)
    handler.emit = lambda record: warned.set()  # type: ignore[method-assign]
    logger = logging.getLogger("seer.drafting.link")
    logger.addHandler(handler)
    try:
        with serving() as address:
            client = DraftClient(ClientConfig(servers=(address,), keys=keys, answer_within_s=0.05))
            client.observe("g", "a", [1, 2, 3])
            assert warned.wait(DEADLINE_S)
            assert client.draft([("g", "b")], [2]).draft(0).tokens.tolist() == [1, 2]
            client.close(timeout_s=0.0)
            assert status(address).tokens == 0
    finally:
        logger.removeHandler(handler)
    assert [record.levelname for record in caplog.records] == ["WARNING"]
    assert "key" in caplog.text


def test_an_impostor_at_the_server_s_address_gets_no_tokens() -> None:
    other_server, _ = make_keys()
    impostor = ServerKeys(secret_key=other_server.secret_key, client_public_key=SERVER_KEYS.client_public_key)
    with serving(keys=impostor) as address, a_socket(address, CLIENT_KEYS) as (socket, monitor):
        socket.send(encode(Ask(1)))
        assert handshake(monitor) & REFUSALS
        assert not socket.poll(0)


def test_an_impostor_without_keys_gets_no_tokens() -> None:
    with zmq.Context() as context, context.socket(zmq.ROUTER) as impostor:
        impostor.setsockopt(zmq.LINGER, 0)
        impostor.bind(ANY_PORT)
        with a_socket(impostor.getsockopt_string(zmq.LAST_ENDPOINT), CLIENT_KEYS) as (socket, monitor):
            socket.send(encode(Ask(1)))
            assert handshake(monitor) & REFUSALS
            assert not impostor.poll(0)


@pytest.fixture(scope="module")
def keyed_server() -> Iterator[str]:
    with serving() as address:
        yield address


@given(st.binary(min_size=1, max_size=200))
@settings(max_examples=30, deadline=None)
def test_any_bytes_on_the_port_leave_the_server_serving(keyed_server: str, garbage: bytes) -> None:
    place = urlsplit(keyed_server)
    assert place.hostname is not None
    with (
        contextlib.suppress(OSError),  # the server may hang up at any moment
        sockets.create_connection((place.hostname, place.port or 0), timeout=DEADLINE_S) as connection,
    ):
        connection.sendall(garbage)
        connection.shutdown(sockets.SHUT_WR)
        while connection.recv(4096):
            pass
    assert status(keyed_server).tokens == 0


def test_keys_fit_each_other_and_are_not_shown() -> None:
    server, client = make_keys()
    assert zmq.curve_public(client.secret_key.encode()).decode() == server.client_public_key
    assert zmq.curve_public(server.secret_key.encode()).decode() == client.server_public_key
    assert server.secret_key not in repr(server)
    assert client.secret_key not in repr(client)


def test_what_is_no_key_is_refused() -> None:
    for key in ("short", "", "0" * 39 + "\xff"):
        with pytest.raises(ConfigError, match="is not a CURVE key"):
            ServerKeys(secret_key=key, client_public_key=SERVER_KEYS.client_public_key)
        with pytest.raises(ConfigError, match="is not a CURVE key"):
            ClientKeys(secret_key=CLIENT_KEYS.secret_key, server_public_key=key)
