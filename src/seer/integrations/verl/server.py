# SPDX-License-Identifier: Apache-2.0
"""The server actor of a replica: verl's vLLM server with our arguments, and our instance around its engine.

verl's HTTP server, its weight sync, sleep and wake stay as they are. The driver reaches the instance by the methods
that begin with `seer_`.

Invariants
  1. The instance runs under the version of verl's newest weight sync: `set_global_steps` is the last call of each. KV
     and drafts of older versions are never used again.
  2. This process ends with its engine, so that verl and the driver see one kind of death.
"""

from __future__ import annotations

import argparse
import asyncio
import os
from typing import Any

import msgspec
import ray
from verl.utils.device import get_device_name
from verl.workers.rollout.vllm_rollout.vllm_async_server import vLLMHttpServer
from vllm.v1.engine.async_llm import AsyncLLM
from vllm.v1.engine.exceptions import EngineDeadError

from seer.engine.base import OutputSink
from seer.engine.instance_wrapper import ModelInstanceWrapper
from seer.engine.vllm.draft_link import DraftLink, publish
from seer.engine.vllm.engine_start import MakeEngine
from seer.engine.vllm.gpu_drafts.install import ready
from seer.engine.vllm.guards import guarded
from seer.engine.vllm.hosted import HostedVllm
from seer.engine.vllm.settings import ENVIRONMENT, VllmSettings
from seer.engine.vllm.telemetry import StepCounts, attach
from seer.hosting.remote.dial import Dial
from seer.hosting.serving import serve_instance
from seer.integrations.verl.driver_name import DRIVER
from seer.integrations.verl.engine_settings import EngineSettings, SharedServices, apply_arguments
from seer.integrations.verl.versions import weights_version
from seer.integrations.verl.worker import EXTENSION, USER_EXTENSION
from seer.metrics.events import EventSink


class ServedVllm(HostedVllm):
    """`HostedVllm` around an engine that verl has started, and ends."""

    def __init__(
        self,
        id: int,
        settings: VllmSettings,
        events: EventSink,
        *,
        make_engine: MakeEngine,
        weights_version: int,
        identity: str,
    ) -> None:
        super().__init__(id, settings, events, make_engine=make_engine)
        self._weights = weights_version, identity

    async def start(self, sink: OutputSink) -> None:
        """Take the engine with the weights it has; its process and its sockets are verl's."""
        await ModelInstanceWrapper.start(self, sink)
        await self.inner.weights_changed(*self._weights)

    async def close(self) -> None:
        """End the chunks in flight; a driver may come again."""
        await self.inner.leave_engine()


class SeerHttpServer(vLLMHttpServer):
    """verl's server of one replica."""

    engine: AsyncLLM

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        for name, value in ENVIRONMENT.items():
            os.environ.setdefault(name, value)  # before vLLM's processes start: equal hashes in every engine
        super().__init__(*args, **kwargs)
        self._engine_settings = EngineSettings(self.config, self.model_config, get_device_name())
        self._settings: VllmSettings | None = None
        self._identity = ""
        self._version = 0
        self._instance: ServedVllm | None = None
        self._serving: set[asyncio.Task[None]] = set()

    def _get_worker_extension_cls(self) -> str:
        return EXTENSION

    def _preprocess_engine_kwargs(self, engine_kwargs: dict[str, Any]) -> None:
        super()._preprocess_engine_kwargs(engine_kwargs)
        theirs = engine_kwargs.pop("worker_extension_cls", None)
        if theirs is not None:
            os.environ[USER_EXTENSION] = theirs

    async def run_server(self, args: argparse.Namespace) -> None:
        """Start the engine with our arguments, then take it."""
        driver = ray.get_actor(DRIVER)
        needs = msgspec.msgpack.encode(self._engine_settings.needs())
        node = ray.get_runtime_context().get_node_id()
        shared = msgspec.msgpack.decode(await driver.services.remote(needs, node), type=SharedServices)
        self._identity = shared.identity
        self._settings = ready(guarded(self._engine_settings.with_services(shared)))
        apply_arguments(args, self._settings, self._identity)
        publish(DraftLink(self._settings.draft_servers, self._settings.draft_keys))
        await super().run_server(args)

    def _use_engine(self, arguments: dict[str, Any], counts: StepCounts) -> AsyncLLM:
        attach(self.engine, counts, alone=self.config.disable_log_stats)
        return self.engine

    async def collective_rpc(self, *args: Any, **kwargs: Any) -> None:
        """Call the workers, for a weight sync above all."""
        try:
            await super().collective_rpc(*args, **kwargs)
        except EngineDeadError:
            os._exit(1)

    async def set_global_steps(self, global_steps: int) -> None:
        """verl has sent the weights of this step."""
        await super().set_global_steps(global_steps)
        version = weights_version(global_steps)
        if self._instance is not None:
            await self._instance.inner.weights_changed(version, self._identity)
        self._version = version

    # For the driver

    async def seer_serve(self, dial: Dial) -> None:
        """Serve the engine to the driver, which waits for this process to dial in."""
        task = asyncio.create_task(serve_instance(dial, self._make))
        self._serving.add(task)
        task.add_done_callback(self._serving.discard)

    async def seer_weights_version(self) -> int:
        """Of the weights that verl sent last."""
        return self._version

    def _make(self, id: int, settings: dict[str, Any], events: EventSink) -> ServedVllm:
        assert self._settings is not None, "served after the start"
        self._instance = ServedVllm(
            id,
            self._settings,
            events,
            make_engine=self._use_engine,
            weights_version=self._version,
            identity=self._identity,
        )
        return self._instance
