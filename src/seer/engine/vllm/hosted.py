# SPDX-License-Identifier: Apache-2.0
"""vLLM as a child process makes it: with pool, draft servers and events.

When the engine's own process dies, this process ends too. The driver then sees a lost instance, gives its requests
to other instances and starts it again, as it does for every engine.
"""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from seer.config import VllmEngineConfig
from seer.drafting.grouped_drafter import GroupedDrafter
from seer.engine.base import OutputSink
from seer.engine.instance_settings import read_settings
from seer.engine.instance_wrapper import ModelInstanceWrapper
from seer.engine.step_events import StepTally
from seer.engine.vllm.engine_start import MakeEngine, settle_process, start_engine
from seer.engine.vllm.instance import ContextReady, VllmInstance
from seer.engine.vllm.leftovers import place_files
from seer.engine.vllm.settings import VllmSettings
from seer.machine.owned_folders import remove_folder
from seer.metrics.events import Decoding, EventSink, Prefilling
from seer.speculation.step_report import StepReport
from seer.types import GROUP_DRAFTS, DraftMode


class HostedVllm(ModelInstanceWrapper[VllmInstance]):
    """A `VllmInstance` whose steps are reported as events."""

    def __init__(
        self, id: int, settings: VllmSettings, events: EventSink, *, make_engine: MakeEngine = start_engine
    ) -> None:
        super().__init__(
            VllmInstance(
                id,
                settings,
                on_death=_end_process,
                on_context_ready=self._on_context_ready,
                make_engine=make_engine,
            )
        )
        self._emit = events
        self._settings = settings
        self._tally = StepTally(id)
        self._seeding: GroupedDrafter | None = None
        self._files: Path | None = None
        self.inner.counts.on_step = self._on_step

    async def start(self, sink: OutputSink) -> None:
        """Start the engine, then settle this process: from here on it serves one engine and nothing else."""
        self._files = place_files()
        await super().start(sink)
        settle_process()

    async def begin_run(
        self, run: str, drafts: DraftMode, weights_version: int, past: Mapping[int, Sequence[Sequence[int]]]
    ) -> None:
        """Draft as this run asks. Instance 0 sends `past` to the draft servers, which pass it to the others."""
        await self.inner.begin_run(run, drafts, weights_version)
        self._tally.clear()
        if self._seeding is not None:
            self._seeding.close()
            self._seeding = None
        settings = self._settings
        if past and self.id == 0 and settings.speculation is not None and settings.draft_servers:
            self._seeding = GroupedDrafter(settings.draft_servers, settings.draft_keys)
            mode: DraftMode = drafts if drafts in GROUP_DRAFTS else "none"
            self._seeding.begin_run(run, mode, weights_version)
            self._seeding.seed_from(past)

    def end_group(self, group: int) -> None:
        """Forget a group's drafts, here and in vLLM's process."""
        self.inner.end_group(group)
        if self._seeding is not None:
            self._seeding.drop(group)

    async def close(self) -> None:
        """Close the engine, then the client that sends `past`."""
        await super().close()
        if self._files is not None:
            remove_folder(self._files)
        if self._seeding is not None:
            self._seeding.close()

    def _on_context_ready(self, ready: ContextReady) -> None:
        chunk = ready.chunk
        now_s = time.monotonic()  # the clock of the event loops, in every process of this machine
        missing = max(0, chunk.num_context_tokens - ready.num_cached_tokens)
        recomputed = max(0, missing - 1 - chunk.num_fresh_tokens) if chunk.num_generated_tokens else 0
        # vLLM does not say where it found cached tokens. Response tokens that this engine never computed came from
        # the pool.
        loaded = max(0, ready.num_cached_tokens - max(ready.num_known_tokens, chunk.num_prompt_tokens))
        self._emit(Prefilling(now_s, chunk.request, self.id, missing, recomputed, loaded))
        self._emit(Decoding(now_s, chunk.request, self.id))

    def _on_step(self, report: StepReport) -> None:
        now_s = time.monotonic()
        self._tally.add(report)
        if self._tally.is_due(now_s) or not self.inner.counts.num_running:
            for event in self._tally.take(now_s):
                self._emit(event)


def _end_process(reason: str) -> None:
    sys.stderr.write(f"vLLM's engine process is gone: {reason}\n")
    sys.stderr.flush()
    os._exit(1)


def make_vllm(id: int, settings: dict[str, Any], events: EventSink) -> HostedVllm:
    """For `InstanceSpec.factory`; `settings` are those of `InstanceSettings`, as plain values."""
    given = read_settings(settings)
    config, engine = given.config, given.engine_settings(VllmEngineConfig)
    assert config.max_model_len is not None, "prepare reads it from the model"
    return HostedVllm(
        id,
        VllmSettings(
            model_dir=config.model,
            max_num_seqs=given.max_num_seqs,
            max_model_len=config.max_model_len,
            block_size=config.kv.block_size,
            kv_blocks=config.kv.blocks,
            kv_memory_bytes=config.kv.memory_bytes,
            tensor_parallel=config.tensor_parallel,
            data_parallel=given.data_parallel,
            dtype=config.dtype,
            device=config.device,
            stream_tokens=engine.stream_tokens,
            speculation=engine.speculation if given.draft_servers is not None else None,
            draft_servers=given.draft_servers or (),
            draft_keys=given.draft_keys,
            pool=given.pool,
            pool_options=engine.pool_options,
            engine=engine.engine,
        ),
        events,
    )
