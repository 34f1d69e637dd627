# SPDX-License-Identifier: Apache-2.0
"""A rank takes NCCL's id from another one, and runs none of its code."""

from __future__ import annotations

import os
import pickle
import secrets
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("vllm")

from vllm.distributed.device_communicators.pynccl_wrapper import ncclUniqueId
from vllm.distributed.utils import StatelessProcessGroup

from seer.engine.vllm.nccl_rendezvous import ID_BYTES, MAX_PICKLE_BYTES, PlainGroup, unique_id
from seer.errors import InputError


class Store:
    """Of both ranks."""

    def __init__(self) -> None:
        self.values: dict[str, bytes] = {}

    def set(self, key: str, value: bytes) -> None:
        self.values[key] = value

    def get(self, key: str) -> bytes:
        return self.values[key]


class Hostile:
    """Makes a folder when it is unpickled."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self) -> Any:
        return os.mkdir, (str(self.path),)


def an_id() -> Any:
    made = ncclUniqueId()
    made.internal[:] = secrets.token_bytes(ID_BYTES)
    return made


def test_the_id_that_vllm_sends_arrives() -> None:
    store: Any = Store()
    sent = an_id()
    StatelessProcessGroup(rank=0, world_size=2, store=store).broadcast_obj(sent, src=0)
    received = PlainGroup(rank=1, world_size=2, store=store).broadcast_obj(None, src=0)
    assert bytes(received.internal) == bytes(sent.internal)
    PlainGroup(rank=0, world_size=2, store=store).broadcast_obj(sent, src=0)
    theirs = StatelessProcessGroup(rank=1, world_size=2, store=store).broadcast_obj(None, src=0)
    assert bytes(theirs.internal) == bytes(sent.internal)


def test_code_of_the_other_rank_does_not_run(tmp_path: Path) -> None:
    made = tmp_path / "made"
    bad = pickle.dumps(Hostile(made))
    store: Any = Store()
    store.values = dict.fromkeys(("broadcast_from/0/0", "send_to/1/0", "broadcast_tensor/0/0", "send_tensor/1/0"), bad)
    for receive in ("broadcast_obj", "broadcast", "recv_obj", "recv"):
        group: Any = PlainGroup(rank=1, world_size=2, store=store)
        arguments = {"recv_obj": (0,)}.get(receive, (None, 0))
        with pytest.raises(InputError):
            getattr(group, receive)(*arguments)
    with pytest.raises(RuntimeError):
        PlainGroup(rank=1, world_size=2, store=store).barrier()
    assert not made.exists()
    pickle.loads(bad)
    assert made.exists(), "it would have been made"


@pytest.mark.parametrize(
    "bad",
    [
        b"",
        b"\x80",
        b"no pickle",
        pickle.dumps("text"),
        pickle.dumps(b"x" * (ID_BYTES - 1)),
        pickle.dumps((b"x" * ID_BYTES, b"y" * ID_BYTES)),
        pickle.dumps(b"x" * MAX_PICKLE_BYTES),
    ],
    ids=["nothing", "a start", "text", "a string", "too short", "two", "too long"],
)
def test_what_is_no_id_is_refused(bad: bytes) -> None:
    with pytest.raises(InputError):
        unique_id(bad)
