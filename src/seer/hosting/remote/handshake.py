# SPDX-License-Identifier: Apache-2.0
"""The first messages on a connection between the driver and an instance's process on another machine.

    driver    Challenge(version, nonce)
    instance  Introduction(version, launch, nonce, proof of the secret)
    driver    Welcome(proof of the secret), or Refused(why) and the end
    driver    AskTime, a few times; the instance answers each with Time

Invariants
  1. Nothing but these messages is read before both proofs fit, none longer than MAX_MESSAGE_BYTES.
  2. A proof fits one connection only: it covers the nonces of both sides, and who speaks.
  3. Two versions of Seer never serve each other: a difference is said by name on both sides.

Waits for                                    unblocked by
  the other side's next message                it, its death, the caller's HANDSHAKE_DEADLINE_S
"""

from __future__ import annotations

import asyncio
import functools
import hashlib
import hmac
import importlib.metadata
import secrets
import time
from collections.abc import Callable, Mapping

import msgspec

from seer.errors import InstanceError
from seer.hosting.channel import HEAD, BadFrame, frame
from seer.hosting.remote.clock import ClockOffset, offset_of
from seer.machine.json_files import UNREADABLE

HANDSHAKE_DEADLINE_S = 20.0
"""Far above a few round trips; a peer that takes longer is dropped."""
MAX_MESSAGE_BYTES = 1024
"""Above every message here."""
NUM_TIME_PROBES = 5
"""The fastest of them says most about the offset of the clocks."""
_NONCE_BYTES = 32


class Challenge(msgspec.Struct, frozen=True, tag=True):
    """The driver's first message."""

    version: str
    nonce: bytes


class Introduction(msgspec.Struct, frozen=True, tag=True):
    """Who the instance's process is."""

    version: str
    launch: str
    nonce: bytes
    proof: bytes


class Welcome(msgspec.Struct, frozen=True, tag=True):
    """The driver knows the secret too."""

    proof: bytes


class Refused(msgspec.Struct, frozen=True, tag=True):
    """The driver goes no further."""

    reason: str


class AskTime(msgspec.Struct, frozen=True, tag=True):
    """What does your clock show?"""


class Time(msgspec.Struct, frozen=True, tag=True):
    """The monotonic clock of the instance's machine."""

    t_s: float


_to_driver = msgspec.msgpack.Decoder(Introduction | Time)
_to_instance = msgspec.msgpack.Decoder(Challenge | Welcome | Refused | AskTime)


@functools.cache
def our_version() -> str:
    """The version of Seer in this process."""
    return importlib.metadata.version("seer-rollout")


async def introduce(reader: asyncio.StreamReader, writer: asyncio.StreamWriter, launch: str, secret: bytes) -> None:
    """The instance's side. Raises if the driver refuses, or is not the one that knows the secret."""
    challenge = await _receive(reader, _to_instance)
    if not isinstance(challenge, Challenge):
        raise BadFrame(f"the driver began with a {type(challenge).__name__}")
    nonce = secrets.token_bytes(_NONCE_BYTES)
    proof = _proof(secret, b"instance", challenge.nonce, nonce)
    writer.write(frame(Introduction(our_version(), launch, nonce, proof)))
    answer = await _receive(reader, _to_instance)
    if isinstance(answer, Refused):
        raise InstanceError(f"the driver refused this process: {answer.reason}")
    if not (
        isinstance(answer, Welcome)
        and hmac.compare_digest(answer.proof, _proof(secret, b"driver", challenge.nonce, nonce))
    ):
        raise InstanceError("the other side does not know the secret of this launch: it is not the driver")
    for _ in range(NUM_TIME_PROBES):
        if not isinstance(await _receive(reader, _to_instance), AskTime):
            raise BadFrame("the driver did not ask for the time")
        writer.write(frame(Time(time.monotonic())))


async def welcome(
    reader: asyncio.StreamReader, writer: asyncio.StreamWriter, expected: Mapping[str, bytes]
) -> tuple[str, ClockOffset]:
    """The driver's side: which launch of `expected` (to their secrets) has come, and how its clock differs."""
    nonce = secrets.token_bytes(_NONCE_BYTES)
    writer.write(frame(Challenge(our_version(), nonce)))
    who = await _receive(reader, _to_driver)
    if not isinstance(who, Introduction):
        raise BadFrame("a process that does not introduce itself")
    secret = expected.get(who.launch)
    if secret is None or not hmac.compare_digest(who.proof, _proof(secret, b"instance", nonce, who.nonce)):
        raise InstanceError("a process without the secret of any launch that is awaited")
    if who.version != our_version():
        reason = f"it has Seer {who.version}, the driver {our_version()}"
        writer.write(frame(Refused(f"{reason}; install one version everywhere")))
        raise VersionDiffers(who.launch, f"a process was refused: {reason}", hint="install one version of Seer on all")
    writer.write(frame(Welcome(_proof(secret, b"driver", nonce, who.nonce))))
    return who.launch, await _compare_clocks(reader, writer, time.monotonic)


class VersionDiffers(InstanceError):  # noqa: N818 - reads as what it is
    """A process proved itself and has another version of Seer."""

    def __init__(self, launch: str, message: str, *, hint: str) -> None:
        super().__init__(message, hint=hint)
        self.launch = launch


async def _compare_clocks(
    reader: asyncio.StreamReader, writer: asyncio.StreamWriter, now_s: Callable[[], float]
) -> ClockOffset:
    probes = []
    for _ in range(NUM_TIME_PROBES):
        asked_s = now_s()
        writer.write(frame(AskTime()))
        answer = await _receive(reader, _to_driver)
        if not isinstance(answer, Time):
            raise BadFrame("a process that does not tell its time")
        probes.append((asked_s, answer.t_s, now_s()))
    return offset_of(probes)


async def _receive(reader: asyncio.StreamReader, decoder: msgspec.msgpack.Decoder[object]) -> object:
    length, _ = HEAD.unpack(await reader.readexactly(HEAD.size))
    if length > MAX_MESSAGE_BYTES:
        raise BadFrame(f"a first message of {length} bytes, and {MAX_MESSAGE_BYTES} are the limit")
    try:
        return decoder.decode(await reader.readexactly(length))
    except UNREADABLE as error:
        raise BadFrame(f"a first message that is none: {error}") from None


def _proof(secret: bytes, speaker: bytes, driver_nonce: bytes, instance_nonce: bytes) -> bytes:
    """That `speaker` knows the secret. The digests have one length, so no two inputs run together."""
    parts = b"".join(hashlib.sha256(part).digest() for part in (speaker, driver_nonce, instance_nonce))
    return hmac.digest(secret, parts, "sha256")
