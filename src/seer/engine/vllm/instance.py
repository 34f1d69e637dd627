# SPDX-License-Identifier: Apache-2.0
"""One vLLM engine as an instance: chunks in, tokens out, in the event loop's thread.

`AsyncLLM` starts the engine in its own process and talks to it. Each chunk is one request to the engine and one task
here, which turns vLLM's outputs into ours.

Waits for                                    unblocked by
  the engine's start                           the engine, or its death
  the next output of a chunk (its task)        the engine, `abort`, its death (`EngineDeadError`)
  an aborted chunk's last output               the engine, ABORT_DEADLINE_S
  weights, pause, resume                       the engine; the host of the instance keeps the deadline

Invariants
  1. `submit` refuses every chunk that is known to fail, so an accepted chunk always ends.
  2. Every request carries its weights version and the weights' identity. vLLM's prefix cache (by `cache_salt`) and the
     pool (by key) therefore never mix two versions.
  3. When the engine process dies, `on_death` is called first and may end this process. Otherwise every chunk in flight
     ends as FAILED and no further chunk is accepted.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
from collections import Counter
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from vllm import SamplingParams
from vllm.inputs import tokens_input
from vllm.v1.engine.async_llm import AsyncLLM
from vllm.v1.engine.exceptions import EngineDeadError

from seer.engine.admission import refuse_new_weights, refuse_unfit
from seer.engine.base import InstanceLimits, InstanceView, OutputSink, Weights
from seer.engine.gpu_handles import SUFFIX
from seer.engine.staged_weights import stage
from seer.engine.vllm.active_chunk import ActiveChunk
from seer.engine.vllm.chunks import request_facts, sampling_params
from seer.engine.vllm.draft_link import DraftLink, publish
from seer.engine.vllm.engine_arguments import engine_arguments
from seer.engine.vllm.engine_start import MakeEngine, start_engine
from seer.engine.vllm.fitting import fit_to_model
from seer.engine.vllm.gpu_drafts.install import ready
from seer.engine.vllm.guards import guarded
from seer.engine.vllm.leased_scheduler import RENEW
from seer.engine.vllm.model_folder import read_folder, weights_identity
from seer.engine.vllm.new_weights import identify
from seer.engine.vllm.sampling_limits import refuse_sampling
from seer.engine.vllm.settings import ENVIRONMENT, VllmSettings
from seer.engine.vllm.shared_cores import worker_threads
from seer.engine.vllm.telemetry import StepCounts
from seer.engine.vllm.version import require_vllm
from seer.errors import InputError, InstanceError, NoProbability, SeerError
from seer.types import Attempt, Chunk, ChunkEnd, ChunkOutput, DraftMode, Lease

if TYPE_CHECKING:
    from vllm.outputs import RequestOutput

log = logging.getLogger(__name__)

ABORT_DEADLINE_S = 5.0
"""How long an aborted chunk may take to send its last output. vLLM sends it with the step in progress; an abort that
overtook its request gets none."""


class ContextReady(NamedTuple):
    """A chunk's context has KV: computed, cached or loaded."""

    chunk: Chunk
    num_cached_tokens: int
    """Tokens of the context that vLLM did not compute for this chunk."""
    num_known_tokens: int
    """Tokens of the request that this engine had computed before this chunk."""


class VllmInstance:
    """One vLLM engine. Implements `seer.engine.base.Instance`."""

    def __init__(
        self,
        id: int,
        settings: VllmSettings,
        *,
        weights_version: int = 0,
        max_waiting: int = 1024,
        on_death: Callable[[str], None] | None = None,
        on_context_ready: Callable[[ContextReady], None] | None = None,
        make_engine: MakeEngine = start_engine,
    ) -> None:
        require_vllm()
        self._id = id
        self.folder = read_folder(Path(settings.model_dir))
        self._settings = fit_to_model(settings, self.folder)
        self._weights_version, self._max_waiting = weights_version, max_waiting
        self._on_death, self._on_context_ready, self._make_engine = on_death, on_context_ready, make_engine
        self._limits: InstanceLimits | None = None
        self._llm: AsyncLLM | None = None
        self._sink: OutputSink | None = None
        self._active: dict[int, ActiveChunk] = {}
        self._known_tokens: dict[int, int] = {}  # request -> tokens of it that this engine has computed
        self._identity = ""
        self._noise_by_position = False
        self._is_closed = False
        self._failure: SeerError | None = None
        self._run = ""
        self._drafts: DraftMode = "none"
        self._ended_groups: list[int] = []
        self._background: set[asyncio.Task[None]] = set()
        self.counts = StepCounts()
        self.num_recomputed_tokens = 0
        """Context tokens that this or another instance had computed before, and that were computed again."""

    # The protocol

    @property
    def id(self) -> int:
        """Dense and unique within a rollout."""
        return self._id

    @property
    def limits(self) -> InstanceLimits:
        """What it can hold; known once it has started."""
        assert self._limits is not None, f"instance {self._id} has not started"
        return self._limits

    async def start(self, sink: OutputSink) -> None:
        """Start the engine process and wait until it serves."""
        assert self._llm is None, f"instance {self._id} is started twice"
        self._sink = sink
        for name, value in ENVIRONMENT.items():
            os.environ.setdefault(name, value)
        if self._settings.device == "cpu":
            os.environ.setdefault("OMP_NUM_THREADS", str(worker_threads()))
        self._identity = await asyncio.to_thread(self._identify, self.folder.path)
        self._settings = await asyncio.to_thread(ready, guarded(self._settings))
        arguments = engine_arguments(self._settings, self._identity)
        publish(DraftLink(self._settings.draft_servers, self._settings.draft_keys))
        self._llm = llm = await asyncio.to_thread(self._make_engine, arguments, self.counts)
        # The runner for CPUs samples as the older one does, whichever is asked for.
        self._noise_by_position = self._settings.device != "cpu" and llm.vllm_config.use_v2_model_runner
        await llm.collective_rpc("seer_exit_with_host", args=(os.getpid(),))
        _refuse_bad_weights(await llm.collective_rpc("seer_check_weights"))
        cache = llm.vllm_config.cache_config
        assert cache.num_gpu_blocks, "a started engine knows its KV blocks"
        self._limits = InstanceLimits(
            kv_blocks=cache.num_gpu_blocks - 1,  # vLLM keeps one for itself
            block_size=cache.block_size,
            max_num_seqs=self._settings.max_num_seqs,
            max_model_len=self._settings.max_model_len,
        )
        await self._warm_up(llm)

    async def _warm_up(self, llm: AsyncLLM) -> None:
        """Generate one token, so that what vLLM delays until its first request happens now."""
        params = SamplingParams(max_tokens=1, detokenize=False, ignore_eos=True, logprobs=0)
        async for _ in llm.generate({"prompt_token_ids": [0]}, params, f"warm-up-{self._id}"):
            pass

    def submit(self, chunk: Chunk) -> None:
        """Start a chunk; refuses one that it could not finish."""
        self._refuse(chunk)
        active = ActiveChunk.of(chunk, self.folder.path)
        self._active[chunk.request] = active
        active.task = asyncio.create_task(self._generate(active))

    def extend(self, leases: Sequence[Lease]) -> None:
        """Let chunks generate more, from the next step on; with vLLM's own scheduler they end where they were to."""
        granted: list[list[int]] = []
        if not self._settings.counts_steps:
            return
        for lease in leases:
            active = self._running(lease.request, lease.attempt)
            if active is not None and lease.max_tokens > active.max_tokens:
                active.max_tokens = lease.max_tokens
                if active.is_begun:
                    granted.append([lease.request, lease.attempt, lease.max_tokens])
        if granted:
            self._in_background(self._renew(self._run, granted, []))

    def park(self, attempts: Sequence[Attempt]) -> None:
        """End chunks with the block they are in; with vLLM's own scheduler they end where they were to."""
        parked: list[list[int]] = []
        if not self._settings.counts_steps:
            return
        for request, attempt in attempts:
            active = self._running(request, attempt)
            if active is None:
                continue
            active.is_parked = True
            if active.is_begun:
                parked.append([request, attempt])
            else:
                active.max_tokens = 1
        if parked:
            self._in_background(self._renew(self._run, [], parked))

    def _running(self, request: int, attempt: int) -> ActiveChunk | None:
        """A chunk that neither ends nor was asked to."""
        active = self._active.get(request)
        is_here = active is not None and active.chunk.attempt == attempt and not active.is_parked
        return active if is_here else None

    async def _renew(self, run: str, leases: list[list[int]], parked: list[list[int]]) -> None:
        with contextlib.suppress(EngineDeadError):
            await self._started().engine_core.call_utility_async(RENEW, run, leases, parked)

    def abort(self, request: int) -> None:
        """End a request's chunk; tokens generated so far are reported first."""
        active = self._active.get(request)
        if active is None or active.is_aborted:
            return
        active.is_aborted = True
        if active.is_begun:
            self._in_background(self._abort(active))

    def view(self) -> InstanceView:
        """As of the newest step."""
        counts = self.counts
        blocks = self._limits.kv_blocks if self._limits is not None else 0
        return InstanceView(
            num_running=min(counts.num_running, len(self._active)),
            num_waiting=max(0, len(self._active) - counts.num_running),
            used_kv_blocks=round(counts.kv_usage * blocks),
            num_preemptions=counts.num_preemptions,
            num_steps=counts.num_steps,
            num_drafted=counts.num_drafted,
            num_accepted=counts.num_accepted,
            weights_version=self._weights_version,
        )

    def cached_prefix_tokens(self, chunk: Chunk) -> int:
        """Full blocks of what this engine has computed of the request; it may have dropped some of them."""
        known = min(self._known_tokens.get(chunk.request, 0), chunk.num_context_tokens)
        return known - known % self.limits.block_size

    async def update_weights(self, weights: Weights, weights_version: int) -> None:
        """Replace the weights in place; what was cached under the old ones is never found again.

        The weights' owner may change them as soon as this returns.
        """
        self._refuse_change(weights_version)
        llm = self._started()
        staged = stage(weights)
        try:
            identity = await self._identify_new(staged.path)
            _refuse_bad_weights(await llm.collective_rpc("seer_load_weights", args=(str(staged.path),)))
        finally:
            staged.discard()
        await self._use_version(weights_version, identity)

    async def weights_changed(self, weights_version: int, identity: str) -> None:
        """A trainer has replaced the engine's weights itself: run under this version from now on.

        `identity` names the weights to the pool: equal on all instances that share one. What was cached under the old
        ones is never found again. The same version again changes nothing. Weights that are not finite are refused: the
        engine has them already, but the version stays the old one.
        """
        self._refuse_change(weights_version, may_repeat=True)
        if weights_version > self._weights_version:
            _refuse_bad_weights(await self._started().collective_rpc("seer_check_weights"))
            await self._use_version(weights_version, identity)

    async def pause(self) -> None:
        """Stop stepping; chunks stay where they are."""
        await self._started().pause_generation(mode="keep", clear_cache=False)

    async def resume(self) -> None:
        """Step again."""
        await self._started().resume_generation()

    async def close(self) -> None:
        """Abort the chunks in flight, then end the engine process."""
        if self._is_closed:
            return
        await self.leave_engine()
        if self._llm is not None:
            llm, self._llm = self._llm, None
            await asyncio.to_thread(llm.shutdown)

    # Beyond the protocol

    async def leave_engine(self) -> None:
        """Abort the chunks in flight and take no more; the engine is left to those who started it."""
        self._is_closed = True
        tasks = list(self._background)
        for active in list(self._active.values()):
            self._end(active, ChunkEnd.ABORTED)
            if active.task is not None:
                active.task.cancel()
                tasks.append(active.task)
        await asyncio.gather(*tasks, return_exceptions=True)

    @property
    def vocab_size(self) -> int:
        """Token ids are below this."""
        return self.folder.vocab_size

    @property
    def failure(self) -> SeerError | None:
        """Why it computes nothing more; None while it works."""
        return self._failure

    async def begin_run(self, run: str, drafts: DraftMode, weights_version: int) -> None:
        """Draft as this run asks; the run's first request carries it to the scheduler."""
        self._run, self._drafts = run, drafts if self._settings.speculation is not None else "none"
        self._ended_groups.clear()  # of another run, whose groups have the same numbers

    def end_group(self, group: int) -> None:
        """Forget a group's drafts; the next request carries it to the scheduler."""
        self._ended_groups.append(group)

    async def pool_counts(self) -> dict[str, float]:
        """Counts of the connector: blocks moved, missed and dropped, and seconds; the sum over the ranks."""
        counts: Counter[str] = Counter()
        for of_rank in await self._started().collective_rpc("seer_pool_counts"):
            counts.update(of_rank)
        return dict(counts)

    async def draft_counts(self) -> list[dict[str, int]]:
        """Counters of the drafts on the GPU, one set per worker; only where they are made there."""
        return list(await self._started().collective_rpc("seer_draft_counts"))

    async def settle_saves(self) -> None:
        """Wait until the blocks of every finished chunk have reached the pool."""
        await self._started().collective_rpc("seer_settle_saves")

    # Chunks

    def _refuse(self, chunk: Chunk) -> None:
        if self._llm is None or self._is_closed:
            raise InstanceError(f"instance {self._id} is not running")
        if self._failure is not None:
            raise InstanceError(f"instance {self._id} has failed: {self._failure}", hint=self._failure.hint)
        refuse_unfit(
            chunk,
            instance=self._id,
            weights_version=self._weights_version,
            limits=self.limits,
            in_flight=self._active,
            max_waiting=self._max_waiting,
            vocab_size=self.folder.vocab_size,
        )
        speculation = self._settings.speculation
        in_scheduler = speculation is not None and speculation.place == "scheduler"
        on_cpu = self._settings.device == "cpu"
        try:
            refuse_sampling(chunk.sampling, self.folder, on_cpu=on_cpu, drafts_in_scheduler=in_scheduler)
        except InputError as error:
            raise InstanceError(str(error), hint=error.hint) from None

    async def _generate(self, active: ActiveChunk) -> None:
        """Pass on one chunk's outputs, from the first to the last."""
        if active.is_aborted:
            self._end(active, ChunkEnd.ABORTED)
            return
        active.is_begun = True
        chunk = active.chunk
        lease = active.max_tokens if self._settings.counts_steps else None
        ended, self._ended_groups = self._ended_groups, []
        facts = request_facts(chunk, self._identity, self._run, self._drafts, ended, lease=lease)
        # In the form that vLLM's renderer makes: any other form waits for a thread of vLLM first.
        prompt = tokens_input(chunk.token_ids(), cache_salt=f"{self._weights_version}/{self._identity}")
        by_position = self._noise_by_position
        try:
            params = sampling_params(chunk, self.folder.eos_token_ids, facts, noise_by_position=by_position)
            async with contextlib.aclosing(self._started().generate(prompt, params, active.name)) as outputs:
                async for output in outputs:
                    self._take(active, output)
                    if active.is_stopped:
                        break  # closing the outputs aborts the request
        except EngineDeadError as error:
            self._die(str(error) or "the engine process is dead")
        except NoProbability as error:
            self._fail(error)
        except asyncio.CancelledError:
            self._end(active, ChunkEnd.ABORTED)
            raise
        except Exception as error:  # the edge: the chunk must end after any error
            log.exception("instance %d: request %d failed", self._id, chunk.request)
            self._end(active, ChunkEnd.FAILED, error=f"{type(error).__name__}: {error}")

    def _take(self, active: ActiveChunk, output: RequestOutput) -> None:
        chunk, (completion,) = active.chunk, output.outputs
        is_first = not active.num_reported
        report = active.take(completion, instance=self._id, vocab_size=self.vocab_size)
        if is_first and active.num_reported:
            self._begin_decoding(chunk, output.num_cached_tokens or 0)
        self._known_tokens[chunk.request] = chunk.num_context_tokens + active.num_reported - 1
        if report is None:
            return
        if report.end is not None:
            self._active.pop(chunk.request, None)
        assert self._sink is not None, "outputs come after start"
        self._sink(report)

    def _begin_decoding(self, chunk: Chunk, num_cached: int) -> None:
        """The chunk's first token has arrived, so its context has KV."""
        if chunk.num_generated_tokens:
            # All but the last token had been computed when its token was sampled.
            num_known = chunk.num_context_tokens - chunk.num_fresh_tokens
            self.num_recomputed_tokens += max(0, num_known - 1 - num_cached)
        if self._on_context_ready is not None:
            self._on_context_ready(ContextReady(chunk, num_cached, self._known_tokens.get(chunk.request, 0)))

    def _end(self, active: ActiveChunk, end: ChunkEnd, *, error: str | None = None) -> None:
        if self._active.pop(active.chunk.request, None) is None:
            return
        assert self._sink is not None, "chunks come after start"
        self._sink(ChunkOutput(active.chunk.request, active.chunk.attempt, self._id, 0, end=end, error=error))

    async def _abort(self, active: ActiveChunk) -> None:
        with contextlib.suppress(EngineDeadError):
            await self._started().abort(active.name)
        assert active.task is not None, "a chunk that has begun has a task"
        # An abort that reaches vLLM before its request has no effect; then the task is cancelled here.
        done, _ = await asyncio.wait([active.task], timeout=ABORT_DEADLINE_S)
        if not done:
            active.task.cancel()

    def _die(self, reason: str) -> None:
        if self._is_closed:
            return
        if self._on_death is not None:
            self._on_death(reason)
        self._is_closed = True
        for active in list(self._active.values()):
            self._end(active, ChunkEnd.FAILED, error=f"instance {self._id} was lost: {reason}")

    def _fail(self, error: SeerError) -> None:
        """The model cannot be used: fail the chunks in flight and accept no more."""
        if self._failure is None:
            self._failure = error
        for active in list(self._active.values()):
            self._end(active, ChunkEnd.FAILED, error=str(self._failure))

    # Set-up

    def _identify(self, weights: Path) -> str:
        """The identity of weights; refuses those of another model."""
        if self._settings.engine.get("load_format") == "dummy":
            return weights_identity(self.folder.path, None)
        return identify(self.folder, weights)

    async def _identify_new(self, weights: Path) -> str:
        """The same of new weights. The worker opens those in GPU memory: this process may not be on a GPU."""
        if weights.suffix != SUFFIX or self._settings.engine.get("load_format") == "dummy":
            return await asyncio.to_thread(self._identify, weights)
        names = (str(self.folder.path), str(weights))
        found, *_ = await self._started().collective_rpc("seer_identify_weights", args=names)
        if found["refused"] is not None:
            raise InputError(found["refused"], hint=found["hint"])
        return str(found["identity"])

    def _refuse_change(self, weights_version: int, *, may_repeat: bool = False) -> None:
        refuse_new_weights(
            weights_version,
            instance=self._id,
            newest=self._weights_version,
            num_in_flight=len(self._active),
            may_repeat=may_repeat,
        )

    async def _use_version(self, weights_version: int, identity: str) -> None:
        # From here on requests carry the new version and identity; resetting the cache only frees memory.
        self._weights_version, self._identity = weights_version, identity
        self._known_tokens.clear()
        await self._started().reset_prefix_cache()

    def _started(self) -> AsyncLLM:
        if self._llm is None:
            raise InstanceError(f"instance {self._id} is not running", hint="await start() first")
        return self._llm

    def _in_background(self, work: Any) -> None:
        task = asyncio.create_task(work)
        self._background.add(task)
        task.add_done_callback(self._background.discard)


def _refuse_bad_weights(answers: list[str | None]) -> None:
    """Raise what a worker found wrong with the weights; one answer per worker."""
    for why in answers:
        if why is not None:
            raise InputError(why, hint="the trainer diverged: load weights from before that")
