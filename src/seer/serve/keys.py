# SPDX-License-Identifier: Apache-2.0
"""Who may call what: an API key for generation, and another one for the administrative endpoints.

    API key   admin key   generation         administration
    none      none        open               open (the server listens on loopback alone)
    set       none        API key            off
    none      set         open               admin key
    set       set         either of the two  admin key

A trainer that sends one key for all it does, as prime-rl, sends the admin key. So the two are never equal: every client
could then change the weights.

Invariants
  1. Keys are compared in constant time, and no representation of them has their text.
  2. A page of another origin cannot call the server, and without keys only this machine's names reach it, so no page
     can by a name of its own (DNS rebinding).

A browser sends the API key as the password of basic authentication, for the live page.
"""

from __future__ import annotations

import base64
import contextlib
import hmac
import ipaddress
import os
import stat
from dataclasses import dataclass, field
from pathlib import Path
from urllib.parse import urlsplit

from starlette.datastructures import Headers

from seer.errors import ConfigError, InputError
from seer.serve.refusals import Refusal

MIN_KEY_CHARS = 16
"""Shorter keys can be guessed."""
MAX_KEY_FILE_BYTES = 4096
_OTHERS = stat.S_IRWXG | stat.S_IRWXO
_ANY = "0.0.0.0"
"""By which TRL calls a local server."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Keys:
    """The keys of a server; None: there is none."""

    api: str | None = field(default=None, repr=False)
    admin: str | None = field(default=None, repr=False)

    def __post_init__(self) -> None:
        """Refuse keys that protect nothing."""
        for name, key in (("API", self.api), ("admin", self.admin)):
            if key is not None and (len(key) < MIN_KEY_CHARS or not key.isascii() or key != key.strip()):
                raise ConfigError(
                    f"the {name} key has {len(key)} characters, or some that no header can carry",
                    hint=f"at least {MIN_KEY_CHARS} ASCII characters without spaces around them",
                )
        if self.admin is not None and self.admin == self.api:
            raise ConfigError(
                "the admin key is the API key, and every client could change the weights",
                hint="a client that has one key for both is given the admin key, which may generate, too",
            )

    def check(self, headers: Headers, *, is_admin: bool) -> None:
        """Raise a Refusal unless these headers of a request let it in."""
        _refuse_other_origin(headers)
        wanted = self.admin if is_admin else self.api
        if wanted is not None:
            given = _given_key(headers).encode()
            is_it = [hmac.compare_digest(given, key.encode()) for key in (wanted, self.admin or wanted)]
            if not any(is_it):  # both were compared: the time does not tell which one it is
                raise Refusal(401, "the key is missing or wrong", hint="Authorization: Bearer KEY")
            return
        if is_admin and self.api is not None:
            raise Refusal(403, "administrative endpoints are off", hint="start the server with --admin-key-file FILE")
        _refuse_other_name(headers)


def read_key(path: Path) -> str:
    """The key in a file that only its owner can read; white space around it is not part of it."""
    try:
        descriptor = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)  # a FIFO without a writer does not wait
        with os.fdopen(descriptor, "rb") as file:
            status, content = os.fstat(descriptor), file.read(MAX_KEY_FILE_BYTES + 1) or b""
        key = content.decode("ascii").strip()
    except OSError as error:
        raise InputError(f"the key file {path} cannot be read: {error.strerror}") from None
    except UnicodeDecodeError:  # whose text would show a part of the key
        raise InputError(f"the key file {path} has characters that no header can carry", hint="ASCII only") from None
    if not stat.S_ISREG(status.st_mode) or len(content) > MAX_KEY_FILE_BYTES:
        raise InputError(f"{path} is no file with a key", hint=f"a regular file of up to {MAX_KEY_FILE_BYTES} bytes")
    if status.st_mode & _OTHERS:
        mode = stat.S_IMODE(status.st_mode)
        raise InputError(f"{path} has mode {mode:04o}: other users can read it", hint=f"chmod 600 {path}")
    return key


def _given_key(headers: Headers) -> str:
    scheme, _, value = headers.get("authorization", "").partition(" ")
    if scheme.lower() == "bearer":
        return value.strip()
    if scheme.lower() == "basic":
        with contextlib.suppress(ValueError):  # also what is no base64, or no UTF-8
            return base64.b64decode(value, validate=True).decode().partition(":")[2]
    return ""


def _refuse_other_origin(headers: Headers) -> None:
    origin = headers.get("origin")
    if origin is None:
        return
    try:
        place = urlsplit(origin).netloc
    except ValueError:  # no address at all
        place = None
    if place != headers.get("host", ""):
        raise Refusal(403, f"pages of {origin[:100]} may not call this server")


def _refuse_other_name(headers: Headers) -> None:
    host = headers.get("host", "")
    try:
        name = urlsplit(f"//{host}").hostname or ""
    except ValueError:
        name = ""
    if host and name != _ANY and not is_loopback(name):
        raise Refusal(
            403, f"this server is not {host[:100]}", hint="call it by 127.0.0.1 or localhost, or give it a key"
        )


def is_loopback(host: str) -> bool:
    """Whether this is a name or an address of this machine alone."""
    if host == "localhost":
        return True
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False
