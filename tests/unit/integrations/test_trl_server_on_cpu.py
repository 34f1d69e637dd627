# SPDX-License-Identifier: Apache-2.0
"""TRL's server mode without CUDA: what the server refuses is said at once, and not when the trainer's half gives up."""

from __future__ import annotations

import threading
from types import SimpleNamespace
from typing import Any

import pytest

pytest.importorskip("trl")

import trl_toy  # noqa: F401 - its imports are quiet
from seer.integrations.trl import server_on_cpu


class Refused(Exception):
    """What TRL's client raises for a status that is not 200."""


@pytest.fixture
def never() -> Any:
    event = threading.Event()
    yield event
    event.set()


def a_client(**settings: Any) -> Any:
    def post(url: str, json: Any) -> None:
        raise Refused(url)

    return SimpleNamespace(
        base_url="", group_port=1, get_world_size=lambda: 1, _post=post, _updating_weights=True, **settings
    )


@pytest.mark.timeout(30)
def test_a_meeting_that_the_server_refuses_is_not_waited_for(
    monkeypatch: pytest.MonkeyPatch, never: threading.Event
) -> None:
    monkeypatch.setattr(server_on_cpu, "GlooGroup", lambda *_, **__: never.wait())
    with pytest.raises(Refused, match="init_weight_transfer_engine"):
        server_on_cpu._join(a_client())


@pytest.mark.timeout(30)
def test_a_broadcast_that_the_server_refuses_is_not_waited_for(never: threading.Event) -> None:
    import torch

    group = SimpleNamespace(broadcast=lambda packed, src: never.wait())
    with pytest.raises(Refused, match="update_weights"):
        server_on_cpu._update(a_client(communicator=group), [("a", "float32", [1])], iter([("a", torch.zeros(1))]))


def test_what_goes_wrong_in_the_trainer_s_half_is_raised() -> None:
    def broken(*_: Any) -> None:
        raise ValueError("no network")

    with pytest.raises(ValueError, match="no network"):
        server_on_cpu._beside(broken).result()
