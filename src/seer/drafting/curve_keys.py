# SPDX-License-Identifier: Apache-2.0
"""Keys of a draft server and its clients: ZeroMQ CURVE, which authenticates both sides and encrypts.

The server has a key pair and knows one client public key. A client has the pair of that key and knows the server's
public key. All instances of a run share the client pair. Without the pair a peer gets no connection, so it can
neither push, fetch nor drop; without the server's pair a process at the server's address gets no tokens.

On disk each side has one JSON file, readable by its owner only: copy the client's file to the machines of the
instances, and keep the server's where the server runs.
"""

import os
import stat
from dataclasses import dataclass, field
from pathlib import Path
from typing import TypeVar

import msgspec
import zmq
from zmq.auth.thread import ThreadAuthenticator

from seer.errors import ConfigError
from seer.machine.given_files import read_given
from seer.machine.json_files import UNREADABLE

SERVER_FILE = "server.json"
CLIENT_FILE = "client.json"

_MAX_KEY_FILE_BYTES = 64 << 10
_DOMAIN = "seer-drafts"
_OTHERS = stat.S_IRWXG | stat.S_IRWXO


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


def write_keys(folder: Path) -> None:
    """Write fresh keys into a folder, which is made if missing; keys that are there are never replaced."""
    try:
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        for name in (SERVER_FILE, CLIENT_FILE):
            if (folder / name).exists():
                raise ConfigError(f"{folder / name} exists", hint="choose another folder, or remove the old keys")
        for name, keys in zip((SERVER_FILE, CLIENT_FILE), make_keys(), strict=True):
            descriptor = os.open(folder / name, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
            with open(descriptor, "wb") as file:
                file.write(msgspec.json.format(msgspec.json.encode(keys)) + b"\n")
    except OSError as problem:
        raise ConfigError(f"cannot write keys to {folder}: {problem.strerror}") from None


def read_server_keys(folder: Path) -> ServerKeys:
    """Return the server's keys that `write_keys` left in a folder."""
    return _read(folder / SERVER_FILE, ServerKeys)


def read_client_keys(folder: Path) -> ClientKeys:
    """Return the client's keys that `write_keys` left in a folder."""
    return _read(folder / CLIENT_FILE, ClientKeys)


Keys = TypeVar("Keys", ServerKeys, ClientKeys)


def _read(file: Path, kind: type[Keys]) -> Keys:
    try:
        mode = stat.S_IMODE(file.stat().st_mode)
        content = read_given(file, limit_bytes=_MAX_KEY_FILE_BYTES)
    except OSError as problem:
        hint = "seer draft-server --make-keys DIR writes a pair of key files"
        raise ConfigError(f"cannot read the keys {file}: {problem.strerror}", hint=hint) from None
    if mode & _OTHERS:
        raise ConfigError(f"{file} has mode {mode:04o}: other users can read it", hint=f"chmod 600 {file}")
    try:
        return msgspec.json.decode(content, type=kind)
    except UNREADABLE as problem:  # without the content: it may hold a secret
        raise ConfigError(f"{file} is not a key file: {problem}") from None


def _check_key(name: str, key: str) -> None:
    try:
        zmq.curve_public(key.encode())  # takes any key of the right form
    except (zmq.ZMQError, ValueError):
        raise ConfigError(f"{name} is not a CURVE key", hint="40 characters of Z85 text") from None
