# SPDX-License-Identifier: Apache-2.0
"""verl's weight sender with a watch: no wait on a receiver that is gone, raises or says nothing."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from multiprocessing.shared_memory import SharedMemory
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("verl")

import ray
import zmq

from seer.errors import DeadlineExceeded, InstanceError
from seer.integrations.verl import weights_sender
from seer.integrations.verl.weights_sender import ServerGone, WatchedSender, WatchedSocket


@pytest.fixture
def pair(tmp_path: Path) -> Iterator[tuple[zmq.Socket[bytes], str]]:
    context = zmq.Context()
    address = f"ipc://{tmp_path}/weights"
    sender = context.socket(zmq.REQ)
    sender.setsockopt(zmq.LINGER, 0)
    sender.bind(address)
    yield sender, address
    sender.close()
    context.term()


@pytest.fixture(autouse=True)
def _impatient(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(weights_sender, "POLL_S", 0.01)
    monkeypatch.setattr(weights_sender, "LAST_ANSWER_S", 0.05)


def finished(monkeypatch: pytest.MonkeyPatch, outcome: Exception | None) -> object:
    """A call that has returned, or raised."""
    call = object()

    def get(asked: object) -> None:
        assert asked is call
        if outcome is not None:
            raise outcome

    monkeypatch.setattr(ray, "wait", lambda calls, timeout: (calls, []))
    monkeypatch.setattr(ray, "get", get)
    return call


def test_a_dead_receiver_ends_the_wait(pair: tuple[zmq.Socket[bytes], str]) -> None:
    watched = WatchedSocket(pair[0], None, lambda: False, 60.0)
    with pytest.raises(ServerGone):
        watched.send_pyobj("nobody is connected")


def test_a_receiver_that_raised_passes_its_error_on(
    pair: tuple[zmq.Socket[bytes], str], monkeypatch: pytest.MonkeyPatch
) -> None:
    call = finished(monkeypatch, ValueError("a tensor has another shape"))
    watched = WatchedSocket(pair[0], call, lambda: True, 60.0)
    with pytest.raises(ValueError, match="another shape"):
        watched.recv()


def test_a_receiver_that_returned_without_an_answer_is_an_error(
    pair: tuple[zmq.Socket[bytes], str], monkeypatch: pytest.MonkeyPatch
) -> None:
    watched = WatchedSocket(pair[0], finished(monkeypatch, None), lambda: True, 60.0)
    with pytest.raises(InstanceError, match="without an answer"):
        watched.recv()


def test_silence_has_a_deadline(pair: tuple[zmq.Socket[bytes], str]) -> None:
    watched = WatchedSocket(pair[0], None, lambda: True, 0.05)
    with pytest.raises(DeadlineExceeded):
        watched.send_pyobj("nobody is connected")


def test_a_receiver_that_answers_is_heard(pair: tuple[zmq.Socket[bytes], str]) -> None:
    received: list[Any] = []

    def receive() -> None:
        with zmq.Context() as context, context.socket(zmq.REP) as socket:
            socket.connect(pair[1])
            received.append(socket.recv_pyobj())
            socket.send(b"taken")

    thread = threading.Thread(target=receive)
    thread.start()
    watched = WatchedSocket(pair[0], None, lambda: True, 60.0)
    watched.send_pyobj({"bucket": 1})
    assert watched.recv() == b"taken"
    thread.join()
    assert received == [{"bucket": 1}]


def test_memory_that_the_dead_receiver_took_along_is_no_error(tmp_path: Path) -> None:
    """Its process's resource tracker removes what it had open."""
    sender = WatchedSender(
        f"ipc://{tmp_path}/weights", 1, use_shm=True, receiver=None, is_alive=lambda: False, deadline_s=1.0
    )
    sender.shm = SharedMemory(create=True, size=16)
    SharedMemory(sender.shm.name).unlink()
    sender._cleanup()
    assert sender.shm is None
