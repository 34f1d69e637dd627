# SPDX-License-Identifier: Apache-2.0
"""Addresses of this machine, and ports of it that nothing listens on."""

from __future__ import annotations

import socket

LOOPBACK = "127.0.0.1"
EVERY_ADDRESS = ""


def free_ports(host: str, num: int) -> list[int]:
    """Different ports that are free at `host` now; another program may take one before it is used.

    Raises OSError if `host` is not an address of this machine.
    """
    sockets = [socket.socket() for _ in range(num)]
    try:
        for one in sockets:
            one.bind((host, 0))
        return [int(one.getsockname()[1]) for one in sockets]
    finally:
        for one in sockets:
            one.close()
