# SPDX-License-Identifier: Apache-2.0
"""Weights that a trainer has written into the engine itself are checked before they get a version."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

pytest.importorskip("vllm")

from seer.errors import InputError

pytestmark = pytest.mark.filterwarnings("ignore::DeprecationWarning")  # torch's own, when vLLM imports it


class Engine:
    """Two workers, the second of which may have found something."""

    def __init__(self, found: str | None) -> None:
        self.found = found
        self.calls: list[str] = []

    async def collective_rpc(self, name: str) -> list[str | None]:
        self.calls.append(name)
        return [None, self.found]

    async def reset_prefix_cache(self) -> None:
        self.calls.append("reset")


def an_instance(engine: Engine) -> Any:
    from seer.engine.vllm.instance import VllmInstance

    made: Any = VllmInstance.__new__(VllmInstance)  # without a model
    made._id, made._llm, made._active, made._known_tokens = 0, engine, {}, {}
    made._weights_version, made._identity = 1, "old"
    return made


def test_weights_that_are_not_finite_are_refused_when_a_trainer_has_written_them() -> None:
    engine = Engine("lm_head.weight has NaN")
    instance = an_instance(engine)
    with pytest.raises(InputError, match=r"lm_head\.weight has NaN"):
        asyncio.run(instance.weights_changed(2, "new"))
    assert (instance._weights_version, instance._identity, engine.calls) == (1, "old", ["seer_check_weights"])


def test_weights_that_are_finite_get_the_version_once() -> None:
    engine = Engine(None)
    instance = an_instance(engine)
    for _ in range(2):
        asyncio.run(instance.weights_changed(2, "new"))
    assert (instance._weights_version, instance._identity) == (2, "new")
    assert engine.calls == ["seer_check_weights", "reset"]
