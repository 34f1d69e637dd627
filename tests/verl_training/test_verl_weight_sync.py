# SPDX-License-Identifier: Apache-2.0
"""A training rank takes part in a weight sync to the end, whatever happens to its server."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest

pytest.importorskip("verl")

import ray

from seer.errors import ConfigError, DeadlineExceeded
from seer.integrations.verl import weights
from seer.integrations.verl.weights import SeerServerAdapter
from seer.integrations.verl.weights_sender import ServerGone

NUM_TENSORS = 5


class Gathered:
    """The stream of tensors that all ranks gather together."""

    def __init__(self) -> None:
        self.num_taken = 0

    def __iter__(self) -> Iterator[tuple[str, int]]:
        for number in range(NUM_TENSORS):
            self.num_taken += 1
            yield f"tensor-{number}", number


def an_adapter(monkeypatch: pytest.MonkeyPatch, error: Exception, *, after: int) -> Any:
    """An adapter whose sending fails after so many tensors."""
    adapter = object.__new__(SeerServerAdapter)
    adapter.replica_rank = 0

    async def send(stream: Any, global_steps: int | None, kwargs: dict[str, Any]) -> None:
        for _ in range(after):
            await anext(stream)
        raise error

    monkeypatch.setattr(adapter, "_send", send)
    return adapter


@pytest.mark.parametrize("after", [0, 2, NUM_TENSORS])
@pytest.mark.parametrize("error", [ServerGone("its actor is dead"), ray.exceptions.ActorDiedError()])
def test_a_dead_server_neither_stops_nor_fails_its_rank(
    monkeypatch: pytest.MonkeyPatch, error: Exception, after: int
) -> None:
    gathered, adapter = Gathered(), an_adapter(monkeypatch, error, after=after)
    asyncio.run(adapter.update_weights(iter(gathered), global_steps=1))
    assert gathered.num_taken == NUM_TENSORS


class Silent:
    """A server some of whose methods never answer."""

    def __init__(self, silent: str) -> None:
        for name in ("wake_up", "sleep", "update_weights", "clear_kv_cache", "set_global_steps"):
            setattr(self, name, SimpleNamespace(remote=self._hang if name == silent else self._answer))

    async def _answer(self, *_: Any, **__: Any) -> None:
        pass

    async def _hang(self, *_: Any, **__: Any) -> None:
        await asyncio.Event().wait()


class Sender:
    """Sends to nobody."""

    def __init__(self, *_: Any, **__: Any) -> None:
        pass

    async def async_send_weights(self, stream: Any) -> None:
        async for _ in stream:
            pass


@pytest.fixture
def killed(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Names of the actors that were killed."""
    found: list[str] = []
    monkeypatch.setattr(ray, "get_actor", lambda name: name)
    monkeypatch.setattr(ray, "kill", found.append)
    return found


@pytest.mark.parametrize(
    ("silent", "said"),
    [
        ("wake_up", "waking up"),
        ("update_weights", "loading the last weights"),
        ("clear_kv_cache", "clearing its cache"),
        ("set_global_steps", "taking the new version"),
        ("sleep", "falling asleep"),
    ],
)
def test_a_server_that_does_not_answer_is_ended_and_the_rank_goes_on(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, killed: list[str], silent: str, said: str
) -> None:
    server: Any = Silent(silent)
    gathered = Gathered()
    adapter: Any = object.__new__(SeerServerAdapter)
    adapter.replica_rank, adapter.node_rank, adapter._deadline_s = 3, 0, 0.05
    adapter.server_handle, adapter.zmq_handle, adapter.use_shm = server, "", True
    adapter.config = SimpleNamespace(
        free_cache_engine=True, checkpoint_engine=SimpleNamespace(update_weights_bucket_megabytes=1)
    )

    async def call(*_: Any, **__: Any) -> Any:
        return asyncio.ensure_future(server.update_weights.remote())

    monkeypatch.setattr(adapter, "_ensure_server_handle", lambda: True)
    monkeypatch.setattr(adapter, "_get_server_name_prefix", lambda: "seer_")
    monkeypatch.setattr(adapter, "_execute_method", call)
    monkeypatch.setattr(weights, "WatchedSender", Sender)

    async def sync() -> None:
        await adapter.resume(["weights"])
        await adapter.update_weights(iter(gathered), global_steps=1)
        await adapter.release()

    asyncio.run(sync())
    assert killed == ["seer_server_3_0"]
    assert f"{said} took longer than 0.05 s" in caplog.text
    assert gathered.num_taken == NUM_TENSORS


def test_a_bucket_that_is_not_answered_ends_the_server(monkeypatch: pytest.MonkeyPatch, killed: list[str]) -> None:
    gathered, adapter = Gathered(), an_adapter(monkeypatch, DeadlineExceeded("a bucket", 1.0), after=2)
    adapter.node_rank = 0
    monkeypatch.setattr(adapter, "_get_server_name_prefix", lambda: "seer_")
    asyncio.run(adapter.update_weights(iter(gathered), global_steps=1))
    assert killed == ["seer_server_0_0"]
    assert gathered.num_taken == NUM_TENSORS


def test_weights_that_a_server_refuses_fail_the_training_after_the_last_tensor(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    gathered, adapter = Gathered(), an_adapter(monkeypatch, ValueError("another shape"), after=2)
    with pytest.raises(ValueError, match="another shape"):
        asyncio.run(adapter.update_weights(iter(gathered), global_steps=1))
    assert gathered.num_taken == NUM_TENSORS


def test_other_formats_are_refused() -> None:
    adapter = object.__new__(SeerServerAdapter)
    with pytest.raises(ConfigError, match="delta_flush"):
        asyncio.run(adapter.update_weights(iter(Gathered()), wire_format="delta_flush"))
