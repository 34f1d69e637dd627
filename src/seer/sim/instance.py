# SPDX-License-Identifier: Apache-2.0
"""A simulated instance: continuous batching as vLLM does it, as a cost model in virtual time.

Requests wait first come, first served. A request is admitted when the KV of its context fits. A request that loads KV
from the pool waits apart, so that it does not block the ones behind it (as vLLM's asynchronous loads). Contexts without
KV are prefilled in pieces beside the decoding of others. Every running request gains `rate` tokens per step: 1, or more
with speculation. When KV memory runs out, the request that was admitted last is preempted: its KV is dropped and
computed again later.

decode_batch.py computes the time of many steps at once, so the instance jumps from one change of the batch to the next.
prefill_queue.py holds the requests whose context is being computed, pool_moves.py those whose KV comes from the pool,
kv_memory.py shared prompts and resting KV. Memory is counted in tokens, not blocks. draft_depths.py chooses draft
depths; engines use another budget.

Invariants
  1. KV of running requests never exceeds the capacity: preemption comes first.
  2. Every submitted chunk gets exactly one output with an end.
  3. Nothing is generated while paused: steps start again where they stopped.
"""

from __future__ import annotations

import asyncio
import math
from collections import deque
from collections.abc import Callable, Sequence

from seer.engine.admission import refuse_misplaced, refuse_new_weights
from seer.engine.base import InstanceLimits, InstanceView, OutputSink, Weights
from seer.metrics.events import Decoding, EventSink, InstanceState, Preempted, Prefilling, discard
from seer.sim.chunk_run import ChunkRun
from seer.sim.costs import InstanceCost, StepTime
from seer.sim.decode_batch import DecodeBatch
from seer.sim.draft_depths import DraftDepths
from seer.sim.kv_memory import KVMemory
from seer.sim.network import ClusterNetwork
from seer.sim.pool_moves import PoolMoves
from seer.sim.pool_tiers import PoolTiers
from seer.sim.prefill_queue import PrefillQueue
from seer.sim.speculation import GroupProgress, SpeculationModel
from seer.types import Attempt, Chunk, ChunkEnd, ChunkOutput, Lease

MAX_BATCHED_TOKENS = 8192
"""Batched tokens of a step, prefill included (vLLM's default on large GPUs)."""
MIN_PREFILL_TOKENS = 256.0
"""Prefill tokens that a step has room for however many requests decode, so that prefill always goes on."""
_EPSILON_STEPS = 1e-6
"""Steps by which two events may differ and still count as simultaneous: absorbs rounding errors."""


class SimulatedInstance:
    """Implements `seer.engine.base.Instance` in virtual time."""

    def __init__(
        self,
        id: int,
        cost: InstanceCost,
        limits: InstanceLimits,
        true_length: Callable[[int], int],
        *,
        speculation: SpeculationModel | None = None,
        progress: GroupProgress | None = None,
        events: EventSink = discard,
        sample_state: bool = True,
        pool: PoolTiers | None = None,
        network: ClusterNetwork | None = None,
        turn_end: Callable[[Chunk], int] | None = None,
    ) -> None:
        """`pool` and `network` are those of the fleet (pool_moves.py). `turn_end` says how many tokens a request with
        turns has generated at the end of the present one.
        """
        self._id = id
        self._cost = cost
        self._limits = limits
        self._true_length = true_length
        self._turn_end = turn_end
        self._progress = progress or GroupProgress()
        self._events = events
        self._sample_state = sample_state
        self._sink: OutputSink | None = None
        self._loop: asyncio.AbstractEventLoop | None = None

        self._weights_version = 0
        self._is_paused = False
        self._in_flight: set[int] = set()  # requests
        self._waiting: deque[ChunkRun] = deque()
        self._moves = PoolMoves(id, cost, pool, network)
        self._prefills = PrefillQueue()
        self._batch = DecodeBatch()

        self._at_s = 0.0

        self._memory = KVMemory(limits.kv_tokens)
        self._depths = DraftDepths(cost, speculation, self._progress)
        self._timer: asyncio.TimerHandle | None = None
        self._replan_pending = False
        self._num_preemptions = 0
        self._step_costs: dict[tuple[int, float, float], StepTime] = {}

    # -- the protocol ------------------------------------------------------------------------------------------------

    @property
    def id(self) -> int:
        """Dense and unique within a rollout."""
        return self._id

    @property
    def limits(self) -> InstanceLimits:
        """KV blocks, sequence slots and context length."""
        return self._limits

    @property
    def node_name(self) -> str | None:
        """Its node, where there is a network between them."""
        return self._moves.node_name

    async def start(self, sink: OutputSink) -> None:
        """Outputs go to `sink` from now on."""
        self._sink = sink
        self._loop = asyncio.get_running_loop()
        self._at_s = self._loop.time()

    def submit(self, chunk: Chunk) -> None:
        """Queue the chunk."""
        assert self._loop is not None, "submit before start"
        refuse_misplaced(
            chunk,
            instance=self._id,
            weights_version=self._weights_version,
            limits=self._limits,
            in_flight=self._in_flight,
        )
        run = ChunkRun(chunk, self._left(chunk), self._loop.time())
        assert run.target >= 1, f"request {chunk.request} has nothing left to generate"
        self._in_flight.add(chunk.request)
        self._progress.started(chunk.group)
        rests = self._memory.resting(chunk.request) > 0
        num_held = self.cached_prefix_tokens(chunk)
        now_s = self._loop.time()
        if not self._moves.load(run, now_s, num_held=num_held, rests=rests, on_arrival=self._replan_soon):
            self._waiting.append(run)
        self._replan_soon()

    def extend(self, leases: Sequence[Lease]) -> None:
        """Move the ends of running chunks."""
        self._advance()
        batch, is_extended = self._batch, False
        for lease in leases:
            decoding = batch.running.get(lease.request)
            run = decoding or self._find(lease.request)
            if run is None or run.chunk.attempt != lease.attempt or lease.max_tokens <= run.lease:
                continue
            if decoding is not None:
                batch.set_lease(decoding, lease.max_tokens)
            else:
                run.set_lease(lease.max_tokens, run.produced)
            is_extended = True
        if is_extended:
            self._replan_soon()

    def park(self, attempts: Sequence[Attempt]) -> None:
        """End chunks with what they have generated; their KV rests."""
        self._advance()
        for request, attempt in attempts:
            run = self._find(request)
            if run is not None and run.chunk.attempt == attempt:
                is_decoding = request in self._batch.running
                produced = self._remove(run)
                if is_decoding:
                    self._memory.rest(request, run.chunk.num_context_tokens + produced)
                    self._moves.save(run, produced)
                self._emit(run, produced, ChunkEnd.PARKED)
                self._replan_soon()

    def prefetch(self, chunk: Chunk) -> None:
        """The pool reads the request's KV from its SSD, unless it rests here."""
        if self._loop is not None and not self._memory.resting(chunk.request):
            self._moves.prefetch(chunk.request, self._loop.time())

    def abort(self, request: int) -> None:
        """End the request's chunk with what it has generated."""
        self._advance()
        run = self._find(request)
        if run is not None:
            self._emit(run, self._remove(run), ChunkEnd.ABORTED)
            self._replan_soon()

    def _find(self, request: int) -> ChunkRun | None:
        run = self._batch.running.get(request)
        return run or next((waiting for waiting in self._not_decoding() if waiting.chunk.request == request), None)

    def _remove(self, run: ChunkRun) -> int:
        """Take a chunk out before its end; returns the whole tokens that it has generated."""
        produced = run.produced
        if run.chunk.request in self._batch.running:
            self._leave(run)
            produced = self._batch.produced(run)
        elif run in self._prefills.queue:
            self._prefills.remove(run)
            self._memory.drop_member(run.chunk)
        elif run in self._waiting:
            self._waiting.remove(run)
        else:
            self._moves.remove(run)
        return max(run.reported, int(produced))

    def _left(self, chunk: Chunk) -> int:
        if chunk.has_turns and self._turn_end is not None:
            return self._turn_end(chunk) - chunk.num_generated_tokens
        return self._true_length(chunk.request) - chunk.num_generated_tokens

    def view(self) -> InstanceView:
        """Current counters."""
        return InstanceView(
            num_running=len(self._batch) + len(self._prefills),
            num_waiting=len(self._waiting) + len(self._moves),
            used_kv_blocks=int(self._used_tokens()) // self._limits.block_size,
            cached_kv_blocks=self._memory.resting_tokens // self._limits.block_size,
            num_preemptions=self._num_preemptions,
            num_steps=int(self._batch.num_steps),
            weights_version=self._weights_version,
        )

    def cached_prefix_tokens(self, chunk: Chunk) -> int:
        """Leading tokens of the chunk's context whose KV this instance holds."""
        shared = chunk.num_prompt_tokens if self._memory.holds_group(chunk.group) else 0
        return self._memory.resting(chunk.request) or shared

    async def update_weights(self, weights: Weights, weights_version: int) -> None:
        """Only the weights version changes; KV of the old one is dropped."""
        refuse_new_weights(
            weights_version, instance=self._id, newest=self._weights_version, num_in_flight=len(self._in_flight)
        )
        self._weights_version = weights_version
        self._memory.forget()

    async def pause(self) -> None:
        """Stop stepping; KV that is being loaded still arrives."""
        self._advance()
        self._is_paused = True
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None

    async def resume(self) -> None:
        """Step again."""
        self._advance()
        self._is_paused = False
        self._replan_soon()

    async def close(self) -> None:
        """End every chunk."""
        for request in [r.chunk.request for r in (*self._batch.running.values(), *self._not_decoding())]:
            self.abort(request)
        if self._timer is not None:
            self._timer.cancel()

    def _not_decoding(self) -> list[ChunkRun]:
        return [*self._waiting, *self._prefills.queue, *self._moves.runs()]

    def _used_tokens(self) -> float:
        return self._batch.context_tokens + self._prefills.context_tokens - self._memory.shared_tokens

    def _make_room(self, num_tokens: float) -> bool:
        return self._memory.make_room(self._used_tokens(), num_tokens)

    # -- the batch ---------------------------------------------------------------------------------------------------

    def _enter(self, run: ChunkRun) -> None:
        """Start decoding."""
        self._batch.enter(run, self._depths.rate(run))
        self._events(Decoding(self._at_s, run.chunk.request, self._id))

    def _leave(self, run: ChunkRun) -> None:
        """Stop decoding before the end."""
        self._batch.leave(run)
        self._memory.drop_member(run.chunk)

    def _admit_waiting(self) -> None:
        """Admit waiting requests in order while their context fits."""
        self._waiting.extend(self._moves.take_arrived(self._at_s))
        memory = self._memory
        while self._waiting and len(self._batch) + len(self._prefills) < self._limits.max_num_seqs:
            run = self._waiting[0]
            chunk = run.chunk
            resting = memory.wake(chunk.request)
            shared = chunk.num_prompt_tokens if memory.holds_group(chunk.group) else 0
            if not self._make_room(run.context + 1 - shared):
                if resting:
                    memory.rest(chunk.request, resting)
                return
            self._waiting.popleft()
            memory.add_member(chunk)
            if self._plan_prefill(run, max(shared, resting)):
                self._prefills.add(run)
            else:
                self._enter(run)

    def _plan_prefill(self, run: ChunkRun, num_cached: int) -> int:
        """Tokens to compute before it decodes; the event also says how many of them were computed before."""
        chunk = run.chunk
        missing = max(0, int(run.context) - num_cached)
        fresh = min(missing, chunk.num_fresh_tokens) if not run.produced else 0
        loaded = self._moves.take_loaded(run, missing - fresh)
        missing -= loaded
        run.prefill = missing
        if missing:
            self._moves.computed(int(run.context) - missing, missing)
        begun = chunk.num_generated_tokens > 0 or run.produced > 0
        recomputed = missing - fresh if begun else 0
        self._events(Prefilling(self._at_s, chunk.request, self._id, missing, recomputed, loaded))
        return missing

    def _preempt_last(self) -> None:
        """Drop the KV of the request that was admitted last; it goes to the head of the queue."""
        request = next(reversed(self._batch.running))
        run = self._batch.running[request]
        produced = self._batch.produced(run)
        self._leave(run)
        run.produced = produced
        run.context = run.chunk.num_context_tokens + int(produced)
        self._num_preemptions += 1
        self._events(Preempted(self._at_s, request, self._id))
        self._waiting.appendleft(run)

    # -- time --------------------------------------------------------------------------------------------------------

    def _advance(self) -> None:
        """Advance the batch to the present time."""
        assert self._loop is not None, "time passes only after start"
        now_s = self._loop.time()
        elapsed_s = now_s - self._at_s
        self._at_s = now_s
        if elapsed_s > 0.0 and not self._is_paused and (self._batch.running or self._prefills.queue):
            self._batch.advance(elapsed_s)

    def _on_timer(self) -> None:
        """Report the chunks that are due. The receiver may submit more at the same instant, so plan after that."""
        self._timer = None
        self._advance()
        self._finish_due()
        self._replan_soon()

    def _replan_soon(self) -> None:
        """Replan once after everything that happens at this instant."""
        if not self._replan_pending:
            assert self._loop is not None, "replan before start"
            self._replan_pending = True
            self._loop.call_soon(self._replan)

    def _replan(self) -> None:
        """Apply what is due, admit requests, and set the timer for the next change of the batch."""
        self._replan_pending = False
        if self._is_paused:
            return
        self._advance()
        self._finish_due()
        if self._batch.num_steps + _EPSILON_STEPS >= self._prefills.end_step:
            for run in self._prefills.finish_piece():
                self._enter(run)
        preempted = False
        while self._batch.running and not self._make_room(self._batch.gain * _EPSILON_STEPS):
            self._preempt_last()
            preempted = True
        if not preempted or self._used_tokens() < self._limits.kv_tokens - self._batch.gain:
            self._admit_waiting()
        self._depths.review(self._batch, self._at_s)
        self._set_step_time()
        if self._sample_state:
            self._report()
        self._set_timer()

    def _finish_due(self) -> None:
        for run, produced, ends in self._batch.take_due(self._batch.num_steps + _EPSILON_STEPS):
            if not ends:
                self._emit(run, produced, None)
                continue
            self._memory.drop_member(run.chunk)
            if not run.is_last or run.chunk.has_turns:
                self._memory.rest(run.chunk.request, run.chunk.num_context_tokens + run.target)
                self._moves.save(run, run.target)
            else:
                self._moves.free(run, run.target)
            self._emit(run, run.target, ChunkEnd.STOP if run.is_last else ChunkEnd.LIMIT)

    def _set_step_time(self) -> None:
        """Set the cost of the coming steps; start a piece of prefill if none is in progress."""
        num_running = len(self._batch)
        tokens_per_request = 1.0 + self._depths.mean_drafted(self._batch)
        room = max(MIN_PREFILL_TOKENS, MAX_BATCHED_TOKENS - num_running * tokens_per_request)
        self._prefills.start_piece(room, self._batch.num_steps)
        key = (num_running, round(tokens_per_request, 2), self._prefills.tokens_per_step(room))
        if key not in self._step_costs:
            self._step_costs[key] = self._cost.step(*key)
        self._batch.step_time = self._step_costs[key]

    def _set_timer(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        assert self._loop is not None, "timer before start"
        batch = self._batch
        when_s = math.inf
        if batch.running or self._prefills.queue:
            num_steps = min(batch.next_due_step(), self._prefills.end_step) - batch.num_steps
            if batch.gain > 0.0:
                free = self._limits.kv_tokens - self._used_tokens()
                num_steps = min(num_steps, max(free, 0.0) / batch.gain + 2 * _EPSILON_STEPS)
            when_s = self._at_s + batch.seconds(max(num_steps, 0.0))
        when_s = min(when_s, self._moves.next_s())
        if batch.running:
            when_s = min(when_s, self._depths.next_review_s)
        if when_s < math.inf:
            self._timer = self._loop.call_at(when_s, self._on_timer)

    # -- outputs and events ------------------------------------------------------------------------------------------

    def _emit(self, run: ChunkRun, produced: int, end: ChunkEnd | None) -> None:
        assert self._sink is not None, "output before start"
        chunk = run.chunk
        if end is not None:
            self._in_flight.discard(chunk.request)
            self._progress.stopped(chunk.group, finished=end is ChunkEnd.STOP)
        num_tokens, run.reported = produced - run.reported, produced
        self._sink(ChunkOutput(chunk.request, chunk.attempt, self._id, num_tokens, end=end))

    def _report(self) -> None:
        num_running = len(self._batch)
        self._events(
            InstanceState(
                self._at_s,
                self._id,
                num_running + len(self._prefills),
                len(self._waiting) + len(self._moves),
                int(self._used_tokens()),
                self._depths.mean_drafted(self._batch),
                self._batch.gain / num_running if num_running else 1.0,
            )
        )
