# SPDX-License-Identifier: Apache-2.0
"""New weights are checked before they get a version: those a trainer wrote into the engine, and those on its GPU."""

from __future__ import annotations

import asyncio
from pathlib import Path
from types import SimpleNamespace
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


def an_instance(engine: Any) -> Any:
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


class Worker:
    """Answers what `seer_identify_weights` of a worker does."""

    def __init__(self, identity: str | None, refused: str | None) -> None:
        self.answer = {"identity": identity, "refused": refused, "hint": "give them"}
        self.calls: list[str] = []

    async def collective_rpc(self, name: str, args: tuple[str, ...]) -> list[Any]:
        self.calls.append(name)
        return [self.answer if name == "seer_identify_weights" else None]

    async def reset_prefix_cache(self) -> None:
        self.calls.append("reset")


def an_instance_of(worker: Worker, tmp_path: Path) -> Any:
    instance = an_instance(worker)
    instance._settings = SimpleNamespace(engine={})
    instance.folder = SimpleNamespace(path=tmp_path)
    return instance


def test_weights_on_the_gpu_are_opened_by_the_worker_alone(tmp_path: Path) -> None:
    """The instance's process may have no context on the GPU; here opening the file would fail: it is not there."""
    worker = Worker("new", None)
    instance = an_instance_of(worker, tmp_path)
    asyncio.run(instance.update_weights(tmp_path / "model.gpu-handles", 2))
    assert worker.calls == ["seer_identify_weights", "seer_load_weights", "reset"]
    assert (instance._weights_version, instance._identity) == (2, "new")


def test_weights_on_the_gpu_of_another_model_are_refused_before_they_are_loaded(tmp_path: Path) -> None:
    worker = Worker(None, "the weights lack model.norm.weight")
    instance = an_instance_of(worker, tmp_path)
    with pytest.raises(InputError, match=r"lack model\.norm\.weight") as refused:
        asyncio.run(instance.update_weights(tmp_path / "model.gpu-handles", 2))
    assert refused.value.hint == "give them"
    assert worker.calls == ["seer_identify_weights"]
    assert (instance._weights_version, instance._identity) == (1, "old")
