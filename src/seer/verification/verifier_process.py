# SPDX-License-Identifier: Apache-2.0
"""The process that verifies responses while a run goes on (verifier.py starts it).

    python -m seer.verification.verifier_process FD

It ends with the driver. It has the lowest priority, so that the instances run first.
"""

from __future__ import annotations

import itertools
import os
import socket
import sys
import traceback
from pathlib import Path

import msgspec

from seer.hosting.channel import frame, receive_blocking
from seer.hosting.child import exit_with_driver
from seer.verification.noise import Scoring
from seer.verification.verify import PlainModel, ResponseToVerify, Verification, verify

LOWEST_PRIORITY = 19
"""Linux knows no lower one."""


class Begin(msgspec.Struct, frozen=True, tag=True, kw_only=True):
    """The first message: the model and weights to verify against."""

    folder: str
    weights: str | None
    """Other weights than the folder's own."""
    scoring: Scoring
    """How the engine sampled."""


class Verify(msgspec.Struct, frozen=True, tag=True):
    """A response to verify."""

    response: ResponseToVerify


class Verified(msgspec.Struct, frozen=True):
    """The answer to a `Verify`."""

    verification: Verification | None = None
    error: str | None = None


_decoder: msgspec.msgpack.Decoder[Begin | Verify] = msgspec.msgpack.Decoder(Begin | Verify)


def main() -> None:
    """Verify the responses that arrive on the socket whose descriptor is the only argument."""
    os.nice(LOWEST_PRIORITY)
    sock = socket.socket(fileno=int(sys.argv[1]))
    exit_with_driver(sock)
    begin = receive_blocking(sock, _decoder)
    assert isinstance(begin, Begin), f"the first message is a {type(begin).__name__}"
    model = PlainModel(Path(begin.folder), Path(begin.weights) if begin.weights is not None else None)
    for number in itertools.count():
        message = receive_blocking(sock, _decoder)
        assert isinstance(message, Verify), f"a {type(message).__name__} came after the first message"
        try:
            answer = Verified(verify(model, [message.response], begin.scoring))
        except Exception as error:  # the driver raises it
            traceback.print_exc()
            answer = Verified(error=f"{type(error).__name__}: {error}")
        sock.sendall(frame(answer, number))


if __name__ == "__main__":
    main()
