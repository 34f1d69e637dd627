# SPDX-License-Identifier: Apache-2.0
"""A training rank takes part in a weight sync to the end, whatever happens to its server."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from typing import Any

import pytest

pytest.importorskip("verl")

import ray

from seer.errors import ConfigError
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
