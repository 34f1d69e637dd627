# SPDX-License-Identifier: Apache-2.0
"""Keys of a draft server and its clients: ZeroMQ CURVE, which authenticates both sides and encrypts.

The server has a key pair and knows one client public key. A client has the pair of that key and knows the server's
public key. All instances of a fleet share the client pair. Without the pair a peer gets no connection, so it can
neither push, fetch nor drop; without the server's pair a process at the server's address gets no tokens.

Keys are made afresh for every fleet, and are in no file.
"""

from dataclasses import dataclass, field

import zmq
from zmq.auth.thread import ThreadAuthenticator

from seer.errors import ConfigError

_DOMAIN = "seer-drafts"


@dataclass(frozen=True, kw_only=True, slots=True)
class ServerKeys:
    """What a draft server needs. Keys are Z85 text, 40 characters."""

    secret_key: str = field(repr=False)
    client_public_key: str
    """The only client key that is let in."""

    def __post_init__(self) -> None:
        _check_key("secret_key", self.secret_key)
        _check_key("client_public_key", self.client_public_key)

    def secure(self, socket: "zmq.Socket[bytes]", context: "zmq.Context[zmq.Socket[bytes]]") -> ThreadAuthenticator:
        """Let in only the known client, from before the socket is bound; the caller stops what is returned."""
        authenticator = ThreadAuthenticator(context)
        authenticator.configure_curve_callback(_DOMAIN, _OneKey(self.client_public_key.encode()))
        authenticator.start()
        socket.setsockopt_string(zmq.ZAP_DOMAIN, _DOMAIN)
        socket.setsockopt(zmq.ZAP_ENFORCE_DOMAIN, 1)  # should the authenticator be gone, no peer is let in
        socket.setsockopt(zmq.CURVE_SERVER, 1)
        socket.setsockopt_string(zmq.CURVE_SECRETKEY, self.secret_key)
        return authenticator


@dataclass(frozen=True, kw_only=True, slots=True)
class ClientKeys:
    """What a draft client needs. Keys are Z85 text, 40 characters."""

    secret_key: str = field(repr=False)
    server_public_key: str
    """The only server key that tokens are sent to."""

    def __post_init__(self) -> None:
        _check_key("secret_key", self.secret_key)
        _check_key("server_public_key", self.server_public_key)

    def secure(self, socket: "zmq.Socket[bytes]") -> None:
        """Encrypt what the socket sends and receives; before it is connected."""
        socket.setsockopt_string(zmq.CURVE_SERVERKEY, self.server_public_key)
        socket.setsockopt(zmq.CURVE_PUBLICKEY, zmq.curve_public(self.secret_key.encode()))
        socket.setsockopt_string(zmq.CURVE_SECRETKEY, self.secret_key)


@dataclass(frozen=True, slots=True)
class _OneKey:
    """A credentials provider, as pyzmq's authenticator asks for one."""

    key: bytes

    def callback(self, domain: str, key: bytes) -> bool:
        """Return whether a client with this public key is let in."""
        return domain == _DOMAIN and key == self.key


def make_keys() -> tuple[ServerKeys, ClientKeys]:
    """Return fresh keys for a server and its clients."""
    server_public, server_secret = (key.decode() for key in zmq.curve_keypair())
    client_public, client_secret = (key.decode() for key in zmq.curve_keypair())
    return (
        ServerKeys(secret_key=server_secret, client_public_key=client_public),
        ClientKeys(secret_key=client_secret, server_public_key=server_public),
    )


def _check_key(name: str, key: str) -> None:
    try:
        zmq.curve_public(key.encode())  # takes any key of the right form
    except (zmq.ZMQError, ValueError):
        raise ConfigError(f"{name} is not a CURVE key", hint="40 characters of Z85 text") from None
