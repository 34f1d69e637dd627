# SPDX-License-Identifier: Apache-2.0
"""vLLM's front end in our process: work that it does for every token is removed."""

from __future__ import annotations

import asyncio
import gc
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

pytest.importorskip("torch")

from vllm_engines import needs_vllm, vllm_settings

pytestmark = needs_vllm


@pytest.fixture
def busy_process() -> Iterator[None]:
    """Undoes what a test changes in its process."""
    yield
    from vllm.envs import disable_envs_cache

    disable_envs_cache()
    gc.unfreeze()


def test_our_stat_logger_is_the_only_one_that_records(monkeypatch: pytest.MonkeyPatch) -> None:
    from vllm.v1.engine.async_llm import AsyncLLM
    from vllm.v1.metrics.loggers import StatLoggerManager

    from seer.engine.vllm import engine_start
    from seer.engine.vllm.telemetry import StepCounts

    asked: dict[str, Any] = {}
    monkeypatch.setattr(engine_start, "AsyncEngineArgs", lambda **_: None)
    monkeypatch.setattr(AsyncLLM, "from_engine_args", lambda _, stat_loggers: asked.update(made=stat_loggers))
    counts = StepCounts()
    taken: list[Any] = []
    monkeypatch.setattr(counts, "take", lambda *stats: taken.append(stats), raising=False)
    engine_start.start_engine({}, counts)
    # vLLM's own Prometheus logger could not even be made from this configuration.
    manager = StatLoggerManager(
        SimpleNamespace(),  # type: ignore[arg-type]
        engine_idxs=[0],
        custom_stat_loggers=asked["made"],
        enable_default_loggers=False,
    )
    manager.log_engine_initialized()
    stats: Any = SimpleNamespace()
    manager.record(stats, None)
    manager.record_sleep_state(0, 0)
    manager.log()
    assert taken == [(stats, None)]


def test_a_hosted_engines_process_settles_once_it_has_started(
    busy_process: None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    import vllm.envs as envs

    from seer.engine.local.tiny import make_tiny_model
    from seer.engine.vllm import hosted as module
    from seer.engine.vllm.hosted import HostedVllm
    from seer.engine.vllm.instance import VllmInstance

    name, was_frozen = "VLLM_COMPUTE_NANS_IN_LOGITS", []

    async def start(self: Any, sink: Any) -> None:
        was_frozen.append(gc.get_freeze_count())
        monkeypatch.setenv(name, "1")  # an engine's start may set variables

    monkeypatch.setattr(VllmInstance, "start", start)
    monkeypatch.setattr(module, "place_files", lambda: tmp_path)  # it moves the temporary files of the whole process
    hosted = HostedVllm(0, vllm_settings(make_tiny_model(tmp_path / "tiny")), lambda event: None)
    asyncio.run(hosted.start(lambda output: None))
    assert was_frozen == [0]
    assert gc.get_freeze_count() > 0, "what the start made is out of the collector's sight"
    monkeypatch.setenv(name, "0")
    assert getattr(envs, name), "variables are read once, after the start"
