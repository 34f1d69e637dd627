# SPDX-License-Identifier: Apache-2.0
"""What a process needs to reach the driver that waits for it, and the connection it makes with that.

A `Dial` holds a secret. It travels through the launcher's own connection (a Ray call, a private socket), never on a
command line, in the environment or in a log; its `repr` does not show the secret.
"""

from __future__ import annotations

import asyncio
import ipaddress
import ssl
from dataclasses import dataclass, field
from typing import TypeVar

import msgspec

from seer.errors import DeadlineExceeded, InstanceError
from seer.hosting.channel import Channel
from seer.hosting.remote.handshake import HANDSHAKE_DEADLINE_S, introduce

T = TypeVar("T")


@dataclass(frozen=True, slots=True, kw_only=True)
class Dial:
    """Where the driver listens for one process, and what the two know of each other."""

    host: str
    port: int
    launch: str
    """Names the process that is awaited; used once."""
    secret: bytes = field(repr=False)
    """Known to the driver and to that process."""
    certificate: str | None = None
    """The driver's own, as PEM; None where the connection does not leave the machine and is not encrypted."""


def is_loopback(host: str) -> bool:
    """Whether an address is reached from this machine alone."""
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"


async def connect(dial: Dial, decoder: msgspec.msgpack.Decoder[T]) -> Channel[T]:
    """Reach the driver and prove to it that this is the process it waits for; it proves itself in turn."""
    where = f"{dial.host}:{dial.port}"
    try:
        async with asyncio.timeout(HANDSHAKE_DEADLINE_S):
            return Channel(*await _streams(dial), decoder, 0)
    except TimeoutError:
        raise DeadlineExceeded(f"the handshake with the driver at {where}", HANDSHAKE_DEADLINE_S) from None
    except (OSError, asyncio.IncompleteReadError) as error:  # ssl.SSLError is an OSError
        raise InstanceError(
            f"the driver at {where} cannot be reached: {error}", hint="can this machine open connections to that one?"
        ) from None


async def _streams(dial: Dial) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
    context = _trusting(dial.certificate) if dial.certificate is not None else None
    reader, writer = await asyncio.open_connection(
        dial.host, dial.port, ssl=context, server_hostname="" if context is not None else None
    )
    try:
        await introduce(reader, writer, dial.launch, dial.secret)
    except BaseException:
        writer.transport.abort()
        raise
    return reader, writer


def _trusting(certificate: str) -> ssl.SSLContext:
    """Accept the driver's own certificate and no other."""
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    context.minimum_version = ssl.TLSVersion.TLSv1_3
    context.check_hostname = False  # the certificate is made for one fleet, whatever its address
    context.load_verify_locations(cadata=certificate)
    return context
