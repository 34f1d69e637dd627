# SPDX-License-Identifier: Apache-2.0
"""Addresses of draft servers: `tcp://HOST:PORT` or `ipc://PATH`, checked before a socket is made for one."""

import re

from seer.errors import ConfigError
from seer.ranges import Port, check

_TCP = re.compile(r"tcp://(?:\[[0-9A-Fa-f:.%\w]+\]|[^\s:/\[\]]+):(\*|[0-9]{1,9})")
_MAX_IPC_PATH_BYTES = 107
"""Of a socket in the file system, by Linux."""


def check_address(address: str) -> None:
    """Refuse what cannot be an address to listen on. A port of 0 or * is left to the system."""
    hint = "like tcp://127.0.0.1:5757 or ipc:///run/drafts"
    if address.startswith("ipc://"):
        path = address.removeprefix("ipc://")
        if not path or "\0" in path or len(path.encode(errors="surrogateescape")) > _MAX_IPC_PATH_BYTES:
            raise ConfigError(f"{address!r} has no usable path", hint=f"1 to {_MAX_IPC_PATH_BYTES} bytes: {hint}")
        return
    match = _TCP.fullmatch(address)
    if match is None:
        raise ConfigError(f"{address!r} is not an address", hint=hint)
    if match[1] != "*":
        check(int(match[1]), Port, f"port of {address}")
