# SPDX-License-Identifier: Apache-2.0
"""The embedded engine as an instance: a worker thread runs the steps, an event loop sends commands and gets outputs.

    event loop thread                              worker thread
    submit, abort, update_weights, ... --queue-->  commands, between two steps
    sink(output)                       <--loop---  all outputs of a step, in one callback

Waits: the worker waits for a command when it has no work. `start`, `update_weights`, `pause`, `resume` and `close` wait
until the worker has run their command, which it does after the step in progress.

Invariants
  1. Only the worker thread changes the engine. `view` and `cached_prefix_tokens` read counters and dictionaries whose
     single operations are atomic.
  2. `submit` refuses a chunk that cannot finish, on the event loop. So an accepted chunk always ends.
  3. An exception in the worker breaks the instance: `failure` is set, all chunks in flight end as FAILED with the
     error, and no chunk is accepted. What the engine holds after an exception is unknown, so it is not used again.
  4. A worker that cannot even report its error ends with an exception; seer.hosting.child then ends the process.
"""

from __future__ import annotations

import asyncio
import logging
import queue
import threading
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from pathlib import Path
from typing import TypeVar

import torch

from seer.drafting.base import DraftBudget, Drafter
from seer.engine.admission import refuse_new_weights, refuse_unfit
from seer.engine.base import InstanceLimits, InstanceView, OutputSink, Weights
from seer.engine.local.active import activate
from seer.engine.local.assembly import MEMORY_SHARE, EngineSettings, assemble, choose_dtype, choose_limits, update
from seer.engine.local.engine import Engine
from seer.engine.local.model_config import ModelConfig, read_config
from seer.engine.local.part_blocks import known_part
from seer.errors import InstanceError, SeerError
from seer.kvpool.base import Pool
from seer.kvpool.keys import block_keys
from seer.speculation.step_report import StepObserver
from seer.types import Attempt, Chunk, ChunkEnd, ChunkOutput, Lease

log = logging.getLogger(__name__)
T = TypeVar("T")
Command = Callable[[], None]


class LocalInstance:
    """One embedded engine. Implements `seer.engine.base.Instance`."""

    def __init__(
        self,
        id: int,
        model_dir: Path | str,
        *,
        kv_blocks: int | None = None,
        kv_memory_bytes: int | None = None,
        memory_share: float = MEMORY_SHARE,
        block_size: int = 16,
        max_num_seqs: int = 32,
        max_waiting: int = 1024,
        max_model_len: int | None = None,
        max_step_tokens: int | None = None,
        dtype: str = "auto",
        device: str = "cpu",
        weights_version: int = 0,
        drafter: Drafter | None = None,
        pool: Pool | None = None,
        budget: DraftBudget | None = None,
        on_step: StepObserver | None = None,
        stream_tokens: int = 16,
        threads: int = 1,
        matrices_dir: Path | str | None = None,
    ) -> None:
        self._id = id
        self._folder = Path(model_dir)
        self.config: ModelConfig = read_config(self._folder)
        on_device = torch.device(device)
        self._settings = EngineSettings(
            dtype=choose_dtype(dtype, on_device),
            device=on_device,
            weights_version=weights_version,
            max_step_tokens=max_step_tokens or (512 if on_device.type == "cpu" else 8192),
            stream_tokens=stream_tokens,
            drafter=drafter,
            budget=budget,
            pool=pool,
            on_step=on_step,
            matrices_dir=None if matrices_dir is None else Path(matrices_dir),
        )
        self._limits = choose_limits(
            self.config,
            self._settings,
            block_size=block_size,
            max_num_seqs=max_num_seqs,
            kv_blocks=kv_blocks,
            kv_memory_bytes=kv_memory_bytes,
            memory_share=memory_share,
            max_model_len=max_model_len,
        )
        self._max_waiting, self._threads, self._weights_version = max_waiting, threads, weights_version
        self._commands: queue.SimpleQueue[Command] = queue.SimpleQueue()
        self._worker: threading.Thread | None = None
        self._engine: Engine | None = None
        self._loop: asyncio.AbstractEventLoop | None = None
        self._sink: OutputSink | None = None
        self._in_flight: dict[int, int] = {}  # request -> attempt; event loop thread
        self._paused = self._closed = False  # worker thread
        self._failure: SeerError | None = None  # set by the worker thread

    # The protocol

    @property
    def id(self) -> int:
        """Dense and unique within a rollout."""
        return self._id

    @property
    def limits(self) -> InstanceLimits:
        """KV blocks, sequence slots and context length."""
        return self._limits

    async def start(self, sink: OutputSink) -> None:
        """Load the weights and start stepping."""
        assert self._worker is None, f"instance {self._id} is started twice"
        self._loop, self._sink = asyncio.get_running_loop(), sink
        self._worker = threading.Thread(target=self._work, name=f"seer-instance-{self._id}", daemon=True)
        self._worker.start()
        try:
            await self._ask(self._open)
        except BaseException:
            await self.close()
            raise

    def submit(self, chunk: Chunk) -> None:
        """Accept a chunk, or raise if the instance could not finish it."""
        self._refuse(chunk)
        with self.engine.shared.starting:
            self._refuse_other_weights()
            self._in_flight[chunk.request] = chunk.attempt
        self._commands.put(lambda: self.engine.add(chunk))

    def extend(self, leases: Sequence[Lease]) -> None:
        """Let chunks generate more, from the next step on."""
        self._commands.put(lambda: self.engine.extend(leases))

    def park(self, attempts: Sequence[Attempt]) -> None:
        """End chunks between two steps."""
        self._commands.put(lambda: self._post(self.engine.park(attempts)))

    def abort(self, request: int) -> None:
        """End a request's chunk between two steps."""
        if request in self._in_flight:
            self._commands.put(lambda: self._post(self.engine.abort(request)))

    def view(self) -> InstanceView:
        """Current counters."""
        if self._engine is None:
            return InstanceView(weights_version=self._weights_version)
        engine, scheduler = self._engine, self._engine.scheduler
        return InstanceView(
            num_running=len(scheduler.running),
            num_waiting=max(0, len(self._in_flight) - len(scheduler.running)),
            used_kv_blocks=scheduler.blocks.num_held,
            cached_kv_blocks=scheduler.blocks.num_cached,
            num_steps=engine.num_steps,
            num_drafted=engine.num_drafted,
            num_accepted=engine.num_accepted,
            weights_version=engine.namespace.weights_version,
        )

    def cached_prefix_tokens(self, chunk: Chunk) -> int:
        """Leading tokens of the chunk's context whose KV this instance holds."""
        engine = self.engine
        keys = block_keys(engine.namespace, chunk.token_ids())
        return len(engine.scheduler.blocks.find(key.tobytes() for key in keys)) * self._limits.block_size

    def prefetch(self, chunk: Chunk) -> None:
        """Have the pool bring the KV that this instance lacks of a context from SSD to DRAM, in the background."""
        pool, engine = self._settings.pool, self._engine
        if pool is not None and engine is not None and chunk.weights_version == self._weights_version:
            active = activate(chunk, engine.namespace, ())
            part = known_part(active, engine.namespace)
            keys = active.keys if part is None else [*active.keys[: part.index], part.key]
            held = len(engine.scheduler.blocks.find(keys))
            if held < len(keys):
                pool.prefetch(keys[held:])

    async def update_weights(self, weights: Weights, weights_version: int) -> None:
        """Replace the weights in place. From then on, KV of the old weights is never found."""
        self._refuse_if_broken()
        refuse_new_weights(
            weights_version, instance=self._id, newest=self._weights_version, num_in_flight=len(self._in_flight)
        )
        await self._ask(lambda: update(self.engine, weights, weights_version))
        self._weights_version = weights_version

    async def pause(self) -> None:
        """Stop stepping. Commands still run."""
        await self._ask(lambda: setattr(self, "_paused", True))

    async def resume(self) -> None:
        """Step again."""
        await self._ask(lambda: setattr(self, "_paused", False))

    async def close(self) -> None:
        """End every chunk, stop the worker, free the memory."""
        if self._worker is None or self._closed:
            return
        if self._worker.is_alive():
            await self._ask(self._shut)
        await asyncio.to_thread(self._worker.join)
        await asyncio.sleep(0)  # let the loop deliver the outputs that the worker has posted
        self._end_in_flight(ChunkEnd.ABORTED, None)  # chunks that the worker could not end
        self._engine = None

    # Beyond the protocol

    @property
    def vocab_size(self) -> int:
        """Token ids are below this."""
        return self.config.vocab_size

    @property
    def failure(self) -> SeerError | None:
        """Why it computes nothing more; None while it works."""
        return self._failure

    @property
    def engine(self) -> Engine:
        """The engine, once started. Only the worker thread may change it; `on_step` runs there."""
        if self._engine is None:
            raise InstanceError(f"instance {self._id} is not running", hint="await start() first")
        return self._engine

    # On the event loop

    def _refuse(self, chunk: Chunk) -> None:
        who = f"instance {self._id}"
        if self._worker is None or self._closed:
            raise InstanceError(f"{who} is not running")
        self._refuse_if_broken()
        refuse_unfit(
            chunk,
            instance=self._id,
            weights_version=self._weights_version,
            limits=self._limits,
            in_flight=self._in_flight,
            max_waiting=self._max_waiting,
            vocab_size=self.config.vocab_size,
        )

    def _refuse_other_weights(self) -> None:
        loaded = self.engine.shared.weights_version
        if loaded != self._weights_version:
            raise InstanceError(
                f"instance {self._id} expects weights version {self._weights_version}, "
                f"but another instance of its process has loaded {loaded}",
                hint="call update_weights on every instance of the process",
            )

    def _deliver(self, outputs: Sequence[ChunkOutput]) -> None:
        assert self._sink is not None, "outputs come after start"
        for output in outputs:
            if output.end is not None:
                self._in_flight.pop(output.request, None)
            self._sink(output)

    def _refuse_if_broken(self) -> None:
        if self._failure is not None:
            raise InstanceError(f"instance {self._id} has failed: {self._failure}", hint=self._failure.hint)

    def _end_in_flight(self, end: ChunkEnd, error: str | None) -> None:
        """End the chunks in flight without asking the engine."""
        self._deliver(
            [
                ChunkOutput(request, attempt, self._id, 0, end=end, error=error)
                for request, attempt in self._in_flight.items()
            ]
        )

    async def _ask(self, command: Callable[[], T]) -> T:
        """Run a command in the worker, between two steps, and wait for its result."""
        assert self._worker is not None, f"instance {self._id} has not started"
        if not self._worker.is_alive():
            raise InstanceError(f"instance {self._id}: its worker thread has ended")
        answer: Future[T] = Future()

        def run() -> None:
            if not answer.set_running_or_notify_cancel():
                return  # its caller has given up
            try:
                answer.set_result(command())
            except BaseException as error:
                answer.set_exception(error)

        self._commands.put(run)
        return await asyncio.wrap_future(answer)

    # In the worker thread

    def _work(self) -> None:
        torch.set_num_threads(self._threads)
        with torch.inference_mode():
            while not self._closed:
                try:
                    self._run_commands(wait=not self._can_step())
                    if self._can_step():
                        self._post(self.engine.step())
                except BaseException as error:  # whatever failed, every chunk must end
                    self._break(error)

    def _can_step(self) -> bool:
        if self._paused or self._closed or self._failure is not None:
            return False
        return self._engine is not None and self._engine.busy

    def _run_commands(self, *, wait: bool) -> None:
        """Run all queued commands; with `wait`, wait for one first."""
        try:
            self._commands.get(block=wait)()
            while True:
                self._commands.get_nowait()()
        except queue.Empty:
            return

    def _break(self, error: BaseException) -> None:
        """Compute nothing more, and fail the chunks in flight. The engine is not asked: it may be what failed."""
        log.error("instance %d failed", self._id, exc_info=error)
        if self._failure is None:
            named = error if isinstance(error, SeerError) else InstanceError(f"{type(error).__name__}: {error}")
            self._failure = named
        assert self._loop is not None, "the worker runs after start"
        self._loop.call_soon_threadsafe(self._end_in_flight, ChunkEnd.FAILED, str(self._failure))

    def _post(self, outputs: Sequence[ChunkOutput]) -> None:
        assert self._loop is not None, "the worker runs after start"
        if outputs and self._failure is None:  # after a failure, the chunks have ended already
            self._loop.call_soon_threadsafe(self._deliver, outputs)

    def _open(self) -> None:
        self._engine = assemble(
            self._id,
            self._folder,
            self.config,
            self._limits,
            self._settings,
            busy=lambda: bool(self._in_flight),
        )

    def _shut(self) -> None:
        try:
            if self._engine is not None and self._failure is None:
                self._post(self._engine.end_all(ChunkEnd.ABORTED))
        except Exception:  # `close` ends the chunks that are left
            log.exception("instance %d: its chunks could not be ended", self._id)
        self._closed = True
