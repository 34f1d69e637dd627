# SPDX-License-Identifier: Apache-2.0
"""verl's sender of weights, with a watch on the receiver: verl's own waits for ever if that dies or raises.

Invariants
  1. Every wait on the socket ends: with the receiver's answer, with its error, or after the deadline.
  2. What a dead receiver took along raises nothing of its own: the error is that it is dead.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

import ray
import zmq
from verl.workers.rollout.vllm_rollout.bucketed_weight_transfer import BucketedWeightSender

from seer.errors import DeadlineExceeded, InstanceError

POLL_S = 0.5
"""Between two looks at the receiver."""
LAST_ANSWER_S = 5.0
"""After the receiver's call has returned: its last answer may still be on its way."""


class ServerGone(InstanceError):  # noqa: N818 - reads as what it is
    """The server of this rank is dead."""


class WatchedSender(BucketedWeightSender):
    """Sends through a socket that is watched."""

    socket: Any
    shm: Any

    def __init__(
        self,
        zmq_handle: str,
        bucket_size_mb: int,
        *,
        use_shm: bool,
        receiver: Any,
        is_alive: Callable[[], bool],
        deadline_s: float,
    ) -> None:
        """`receiver` is the call that receives, where this rank made it."""
        super().__init__(zmq_handle, bucket_size_mb, use_shm)
        self._receiver, self._is_alive, self._deadline_s = receiver, is_alive, deadline_s

    def _init_socket(self) -> None:
        super()._init_socket()
        self.socket.setsockopt(zmq.LINGER, 0)  # what a dead receiver did not take is dropped with the socket
        self.socket = WatchedSocket(self.socket, self._receiver, self._is_alive, self._deadline_s)

    def _cleanup(self) -> None:
        try:
            super()._cleanup()
        except FileNotFoundError:  # the shared memory: the resource tracker of a receiver that died has removed it
            self.shm = None
            super()._cleanup()


class WatchedSocket:
    """A socket of ZeroMQ whose waits end."""

    def __init__(
        self, socket: zmq.Socket[bytes], receiver: Any, is_alive: Callable[[], bool], deadline_s: float
    ) -> None:
        self._socket = socket
        self._receiver, self._is_alive, self._deadline_s = receiver, is_alive, deadline_s

    def send_pyobj(self, message: Any) -> None:
        """Send once a receiver is there."""
        self._wait(zmq.POLLOUT)
        self._socket.send_pyobj(message)

    def recv(self) -> bytes:
        """The receiver's answer."""
        self._wait(zmq.POLLIN)
        return self._socket.recv()

    def close(self) -> None:
        """Close the socket."""
        self._socket.close()

    def _wait(self, what: int) -> None:
        until_s = time.monotonic() + self._deadline_s
        while not self._socket.poll(int(1000 * POLL_S), what):
            if self._receiver is not None and ray.wait([self._receiver], timeout=0)[0]:
                if self._socket.poll(int(1000 * LAST_ANSWER_S), what):
                    return
                ray.get(self._receiver)  # raises its error
                raise InstanceError("the server took the weights without an answer")
            if not self._is_alive():
                raise ServerGone("its actor is dead")
            if time.monotonic() > until_s:
                raise DeadlineExceeded("a server's answer to a bucket of weights", self._deadline_s)
