"""vLLM as a child process makes it: with its share of the pool and the draft servers, and events.

When the engine's own process dies, this one ends too: the driver then sees a lost instance, gives its requests
to others and starts it anew, as it does for every engine.
"""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Mapping, Sequence
from typing import Any

from seer.drafting.grouped_drafter import GroupedDrafter
from seer.engine.base import OutputSink
from seer.engine.step_events import REPORT_S, add_up
from seer.engine.vllm.instance import VllmInstance, settle_process
from seer.engine.vllm.settings import Speculation, VllmSettings
from seer.metrics.events import Decoding, EventSink, Prefilling
from seer.speculation.step_report import StepReport
from seer.types import Chunk, DraftMode


class HostedVllm(VllmInstance):
    """`VllmInstance` that tells the driver what its steps do."""

    def __init__(self, id: int, settings: VllmSettings, events: EventSink) -> None:
        super().__init__(id, settings, on_death=_end_process)
        self._emit = events
        self._steps: list[StepReport] = []
        self._reported_s = 0.0
        self._past: GroupedDrafter | None = None
        self.counts.on_step = self._watch_step

    async def start(self, sink: OutputSink) -> None:
        """Also settle this process: from here on it serves one engine and nothing else."""
        await super().start(sink)
        settle_process()

    async def begin_run(
        self, run: str, drafts: str, weights_version: int, past: Mapping[int, Sequence[Sequence[int]]] | None = None
    ) -> None:
        """Draft as this run asks; one instance tells the draft servers what an earlier epoch said."""
        await super().begin_run(run, drafts, weights_version)
        self._steps = []
        if self._past is not None:
            self._past.close()
            self._past = None
        speculation = self._settings.speculation
        if past and self.id == 0 and speculation is not None and speculation.servers:
            self._past = GroupedDrafter(speculation.servers, None)
            mode: DraftMode = "grouped" if drafts == "grouped" else "none"
            self._past.begin_run(run, mode, weights_version)
            self._past.seed_from(past)

    async def close(self) -> None:
        """Also stop the thread that tells the draft servers."""
        await super().close()
        if self._past is not None:
            self._past.close()

    def _begin_decoding(self, chunk: Chunk, num_cached: int) -> None:
        super()._begin_decoding(chunk, num_cached)
        now_s = time.monotonic()  # the clock of the event loops, in every process of this machine
        missing = max(0, chunk.num_context_tokens - num_cached)
        recomputed = max(0, missing - 1) if chunk.num_generated_tokens else 0
        # vLLM does not say what it found where. What no chunk here computed of the response came from the pool.
        loaded = max(0, num_cached - max(self._known_tokens.get(chunk.request, 0), chunk.num_prompt_tokens))
        self._emit(Prefilling(now_s, chunk.request, self.id, missing, recomputed, loaded))
        self._emit(Decoding(now_s, chunk.request, self.id))

    def _watch_step(self, report: StepReport) -> None:
        now_s = time.monotonic()
        self._steps.append(report)
        if now_s - self._reported_s >= REPORT_S or not self.counts.num_running:
            self._reported_s = now_s
            steps, self._steps = self._steps, []
            for kind in (False, True):  # apart, so that what a plain decoding step costs can be read off the log
                chosen = [step for step in steps if bool(step.num_prefill_tokens) is kind]
                if chosen:
                    self._emit(add_up(now_s, self.id, chosen))


def _end_process(reason: str) -> None:
    sys.stderr.write(f"vLLM's engine process is gone: {reason}\n")
    sys.stderr.flush()
    os._exit(1)


def make_vllm(id: int, settings: dict[str, Any], events: EventSink) -> HostedVllm:
    """For `InstanceSpec.factory`. `draft_servers` and `speculation` are put together; the rest is `VllmSettings`'."""
    own = dict(settings)
    servers = own.pop("draft_servers", None)
    wanted = own.pop("speculation", None)
    speculation = None
    if servers is not None and wanted is not None:
        speculation = Speculation(servers=tuple(servers), **wanted)
    return HostedVllm(id, VllmSettings(speculation=speculation, **own), events)
