"""The process that scores responses again while a run goes on (verifier.py starts it).

    python -m seer.verification.verifier_process FD

It ends when the driver is gone, and never competes with the instances: its priority is the lowest there is.
"""

from __future__ import annotations

import os
import socket
import sys
import traceback
from pathlib import Path

import msgspec

from seer.hosting.channel import frame, receive_blocking
from seer.hosting.child import exit_with_driver
from seer.verification.rescoring import PlainModel, ResponseToVerify, Verification, verify

LOWEST_PRIORITY = 19


class Begin(msgspec.Struct, frozen=True, tag=True, kw_only=True):
    """The first message: what to hold the responses against."""

    folder: str
    weights: str | None
    """Other weights than the folder's own."""
    dtype: str
    """What the engine computed in."""


class Score(msgspec.Struct, frozen=True, tag=True):
    """A response to score."""

    claim: ResponseToVerify


class Scored(msgspec.Struct, frozen=True):
    """The answer to a `Score`."""

    verification: Verification | None = None
    error: str | None = None


_decoder: msgspec.msgpack.Decoder[Begin | Score] = msgspec.msgpack.Decoder(Begin | Score)


def main() -> None:
    """Score whatever comes over the socket whose descriptor is the only argument."""
    os.nice(LOWEST_PRIORITY)
    sock = socket.socket(fileno=int(sys.argv[1]))
    exit_with_driver(sock)
    begin = receive_blocking(sock, _decoder)
    assert isinstance(begin, Begin), f"the first message is a {type(begin).__name__}"
    model = PlainModel(Path(begin.folder), Path(begin.weights) if begin.weights is not None else None)
    while True:
        message = receive_blocking(sock, _decoder)
        assert isinstance(message, Score), f"a {type(message).__name__} came after the first message"
        try:
            scored = Scored(verify(model, [message.claim], dtype=begin.dtype))
        except Exception as error:  # the driver raises it again
            traceback.print_exc()
            scored = Scored(error=f"{type(error).__name__}: {error}")
        sock.sendall(frame(scored))


if __name__ == "__main__":
    main()
