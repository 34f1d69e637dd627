"""A simulated instance: continuous batching as vLLM does it, as a cost model in virtual time.

Requests wait first come, first served; one is let in when its context's KV fits. One whose KV is on its way from the
pool waits apart and keeps nobody behind it (vLLM's asynchronous loads). Contexts without KV are computed in
pieces beside the decoding of others. Every running request gains `rate` tokens a step (1, or more with speculation).
When KV memory runs out, the request that was let in last is preempted: its KV is dropped and recomputed later.

Between two changes of the batch a step's cost is linear in the context, so any number of steps has a closed form and
the instance jumps from change to change. Steps are continuous quantities here; memory is counted in tokens, not blocks.

    step k of a stretch costs   base + c·(S + R·k)          S: context tokens now, R: tokens gained per step
    n steps cost                n·(base + c·S) + c·R·n²/2

Invariants
  1. KV of running requests never exceeds the capacity: preemption comes first.
  2. Every submitted chunk gets exactly one output with an end.
  3. Nothing is generated while paused: steps start again where they stopped.
"""

from __future__ import annotations

import asyncio
import heapq
import math
from collections import deque
from collections.abc import Callable
from functools import lru_cache

from seer.engine.base import InstanceLimits, InstanceView, OutputSink, Weights
from seer.errors import InstanceError
from seer.metrics.events import Decoding, EventSink, InstanceState, Preempted, Prefilling, discard
from seer.sim.costs import InstanceCost, StepTime
from seer.sim.kv_memory import KVMemory
from seer.sim.speculation import GroupProgress, SpeculationModel
from seer.speculation.budget import OFF, Depths, geometric_survival, tokens_per_step
from seer.types import Chunk, ChunkEnd, ChunkOutput

MAX_BATCHED_TOKENS = 8192
"""Tokens one step may carry, prefill included (vLLM's default on large GPUs)."""
DEPTH_REVIEW_S = 20.0
"""Draft depths and acceptance are reviewed at least this often, and whenever the batch changed by an eighth."""
_EPSILON_STEPS = 1e-6


class _Run:
    """A chunk in this instance's hands."""

    __slots__ = (
        "chunk",
        "context",
        "end_step",
        "entered_step",
        "is_last",
        "prefill",
        "produced",
        "rate",
        "ready_s",
        "target",
        "version",
    )

    def __init__(self, chunk: Chunk, target: int, is_last: bool) -> None:
        self.chunk = chunk
        self.target = target  # tokens this chunk will generate
        self.is_last = is_last  # the model stops at the target
        self.context: float = chunk.num_context_tokens  # when its rate was last set
        self.produced = 0.0  # of the target, up to then
        self.rate = 1.0
        self.entered_step = 0.0
        self.end_step = 0.0
        self.version = 0  # of its heap entry
        self.prefill = 0  # tokens to compute before decoding
        self.ready_s = 0.0  # when KV pulled from the pool has arrived


@lru_cache(maxsize=65536)
def _rate(acceptance: float, depth: int) -> float:
    """Tokens a request gains per step."""
    return tokens_per_step(geometric_survival(acceptance), depth)


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
    ) -> None:
        self._id = id
        self._cost = cost
        self._limits = limits
        self._true_length = true_length
        self._speculation = speculation
        self._progress = progress or GroupProgress()
        self._events = events
        self._sample_state = sample_state
        self._sink: OutputSink | None = None
        self._loop: asyncio.AbstractEventLoop | None = None

        self._weights_version = 0
        self._is_paused = False
        self._in_flight: set[int] = set()  # requests
        self._waiting: deque[_Run] = deque()
        self._loading: list[tuple[float, int, _Run]] = []  # heap by arrival of the KV they pull; others overtake
        self._prefilling: deque[_Run] = deque()
        self._prefill_end_step = math.inf
        self._prefill_batch = 0
        self._running: dict[int, _Run] = {}  # in order of admission
        self._ends: list[tuple[float, int, int, _Run]] = []  # (end step, request, version, run)
        self._num_probes = 0

        self._steps = 0.0
        self._at_s = 0.0
        self._context = 0.0  # S, of running requests
        self._gain = 0.0  # R
        self._prefilling_tokens = 0.0
        self._memory = KVMemory(limits.kv_tokens)
        self._step_time = StepTime(0.0, 0.0)
        self._depths: Depths = OFF
        self._reviewed_batch = 0
        self._reviewed_s = -math.inf
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
        """What it can hold."""
        return self._limits

    async def start(self, sink: OutputSink) -> None:
        """Outputs go to `sink` from now on."""
        self._sink = sink
        self._loop = asyncio.get_running_loop()
        self._at_s = self._loop.time()

    def submit(self, chunk: Chunk) -> None:
        """Queue the chunk."""
        assert self._loop is not None, "submit before start"
        self._refuse(chunk)
        left = self._true_length(chunk.request) - chunk.num_generated_tokens
        run = _Run(chunk, min(left, chunk.max_tokens), left <= chunk.max_tokens)
        assert run.target >= 1, f"request {chunk.request} has nothing left to generate"
        self._in_flight.add(chunk.request)
        self._progress.started(chunk.group)
        if chunk.load_kv:
            missing = chunk.num_context_tokens - self.cached_prefix_tokens(chunk)
            run.ready_s = self._loop.time() + self._cost.transfer_s(missing)
            heapq.heappush(self._loading, (run.ready_s, chunk.request, run))
        else:
            self._waiting.append(run)
        self._replan_soon()

    def abort(self, request: int) -> None:
        """End the request's chunk with what it has generated."""
        self._advance()
        run = self._running.get(request)
        if run is not None:
            self._leave(run)
            produced = self._produced(run)
        else:
            waiting = [r for r in self._not_decoding() if r.chunk.request == request]
            if not waiting:
                return
            run = waiting[0]
            produced = run.produced
            if run in self._prefilling:
                self._prefilling.remove(run)
                self._prefill_batch = 0
                self._prefill_end_step = math.inf
                self._prefilling_tokens -= run.context
                self._memory.drop_member(run.chunk)
            elif run in self._waiting:
                self._waiting.remove(run)
            else:
                self._loading = [entry for entry in self._loading if entry[2] is not run]
                heapq.heapify(self._loading)
        self._emit(run, int(produced), ChunkEnd.ABORTED)
        self._replan_soon()

    def view(self) -> InstanceView:
        """How it is doing."""
        return InstanceView(
            num_running=len(self._running) + len(self._prefilling),
            num_waiting=len(self._waiting) + len(self._loading),
            used_kv_blocks=int(self._used_tokens()) // self._limits.block_size,
            cached_kv_blocks=self._memory.resting_tokens // self._limits.block_size,
            num_preemptions=self._num_preemptions,
            num_steps=int(self._steps),
            weights_version=self._weights_version,
        )

    def cached_prefix_tokens(self, chunk: Chunk) -> int:
        """Tokens of the chunk's context with KV here."""
        shared = chunk.num_prompt_tokens if self._memory.holds_group(chunk.group) else 0
        return self._memory.resting(chunk.request) or shared

    async def update_weights(self, weights: Weights, weights_version: int) -> None:
        """Only the weights version changes; KV of the old one is dropped."""
        if self._in_flight:
            raise InstanceError(f"instance {self._id} runs {len(self._in_flight)} chunks; weights change between runs")
        if weights_version <= self._weights_version:
            raise InstanceError(
                f"weights version {weights_version} is not newer than {self._weights_version}",
                hint="versions only go up",
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
        """End what is left."""
        for request in [r.chunk.request for r in (*self._running.values(), *self._not_decoding())]:
            self.abort(request)
        if self._timer is not None:
            self._timer.cancel()

    def _refuse(self, chunk: Chunk) -> None:
        if chunk.weights_version != self._weights_version:
            raise InstanceError(
                f"request {chunk.request} wants weights version {chunk.weights_version}, "
                f"instance {self._id} runs {self._weights_version}"
            )
        if chunk.request in self._in_flight:
            raise InstanceError(f"request {chunk.request} already runs on instance {self._id}")
        end_tokens = chunk.num_context_tokens + chunk.max_tokens
        if end_tokens > self._limits.max_model_len:
            raise InstanceError(
                f"request {chunk.request} could reach {end_tokens} tokens of {self._limits.max_model_len} at most"
            )

    def _not_decoding(self) -> list[_Run]:
        return [*self._waiting, *self._prefilling, *(entry[2] for entry in self._loading)]

    def _used_tokens(self) -> float:
        return self._context + self._prefilling_tokens - self._memory.shared_tokens

    def _make_room(self, num_tokens: float) -> bool:
        return self._memory.make_room(self._used_tokens(), num_tokens)

    # -- the batch ---------------------------------------------------------------------------------------------------

    def _produced(self, run: _Run) -> float:
        return min(float(run.target), run.produced + (self._steps - run.entered_step) * run.rate)

    def _enter(self, run: _Run) -> None:
        """Start decoding."""
        chunk = run.chunk
        run.entered_step = self._steps
        run.rate = 1.0
        if self._speculation is not None:
            depth = self._depths.probes if chunk.is_probe else self._depths.others
            run.rate = _rate(self._speculation.acceptance(self._progress, chunk.group), depth)
        self._running[chunk.request] = run
        self._num_probes += chunk.is_probe
        self._context += run.context
        self._gain += run.rate
        self._push_end(run)
        self._events(Decoding(self._at_s, chunk.request, self._id))

    def _leave(self, run: _Run) -> None:
        """Stop decoding, for whatever reason; its KV is the caller's to keep or drop."""
        del self._running[run.chunk.request]
        self._num_probes -= run.chunk.is_probe
        self._context -= run.context + (self._produced(run) - run.produced)
        self._gain -= run.rate
        run.version += 1
        if not self._running:
            self._context = self._gain = 0.0  # sheds rounding errors
        self._memory.drop_member(run.chunk)

    def _push_end(self, run: _Run) -> None:
        run.version += 1
        run.end_step = self._steps + (run.target - self._produced(run)) / run.rate
        heapq.heappush(self._ends, (run.end_step, run.chunk.request, run.version, run))

    def _next_end_step(self) -> float:
        ends = self._ends
        while ends and ends[0][2] != ends[0][3].version:
            heapq.heappop(ends)
        return ends[0][0] if ends else math.inf

    def _admit_waiting(self) -> None:
        """Let waiting requests in while their context fits, in order."""
        while self._loading and self._loading[0][0] <= self._at_s:
            self._waiting.append(heapq.heappop(self._loading)[2])
        memory = self._memory
        while self._waiting and len(self._running) + len(self._prefilling) < self._limits.max_num_seqs:
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
                self._prefilling_tokens += run.context
                self._prefilling.append(run)
            else:
                self._enter(run)

    def _plan_prefill(self, run: _Run, num_cached: int) -> int:
        """How many tokens must be computed before it decodes; says also how many of them for the second time."""
        chunk = run.chunk
        missing = max(0, int(run.context) - num_cached)
        loaded = 0
        if run.ready_s:
            loaded, missing = missing, 0
            run.ready_s = 0.0  # if preempted later, it is recomputed
        run.prefill = missing
        begun = chunk.num_generated_tokens > 0 or run.produced > 0
        recomputed = missing if begun else 0
        self._events(Prefilling(self._at_s, chunk.request, self._id, missing, recomputed, loaded))
        return missing

    def _preempt_last(self) -> None:
        """Drop the KV of the request that was let in last; it goes to the head of the queue."""
        request = next(reversed(self._running))
        run = self._running[request]
        produced = self._produced(run)
        self._leave(run)
        run.produced = produced
        run.context = run.chunk.num_context_tokens + int(produced)
        self._num_preemptions += 1
        self._events(Preempted(self._at_s, request, self._id))
        self._waiting.appendleft(run)

    # -- time --------------------------------------------------------------------------------------------------------

    def _seconds(self, num_steps: float) -> float:
        time = self._step_time
        flat = time.base_s + time.per_context_token_s * self._context
        return num_steps * (flat + time.per_context_token_s * self._gain * num_steps / 2)

    def _steps_in(self, seconds: float) -> float:
        """Inverse of `_seconds`."""
        time = self._step_time
        flat = time.base_s + time.per_context_token_s * self._context
        bend = time.per_context_token_s * self._gain
        if bend <= 0.0:
            return seconds / flat
        return 2.0 * seconds / (flat + math.sqrt(flat * flat + 2.0 * bend * seconds))

    def _advance(self) -> None:
        """Bring the batch up to the present."""
        assert self._loop is not None, "time passes only after start"
        now_s = self._loop.time()
        elapsed_s = now_s - self._at_s
        self._at_s = now_s
        if elapsed_s <= 0.0 or self._is_paused or not (self._running or self._prefilling):
            return
        num_steps = self._steps_in(elapsed_s)
        self._steps += num_steps
        self._context += self._gain * num_steps

    def _on_timer(self) -> None:
        """Hand out what is due; whoever gets it may submit more at this very instant, so plan after that."""
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
        """Apply what is due, let requests in, and set the alarm for the next change of the batch."""
        self._replan_pending = False
        if self._is_paused:
            return
        self._advance()
        self._finish_due()
        self._finish_prefill()
        preempted = False
        while self._running and not self._make_room(self._gain * _EPSILON_STEPS):
            self._preempt_last()
            preempted = True
        if not preempted or self._used_tokens() < self._limits.kv_tokens - self._gain:
            self._admit_waiting()
        self._review_depths()
        self._set_step_time()
        if self._sample_state:
            self._report()
        self._set_alarm()

    def _finish_due(self) -> None:
        due = self._steps + _EPSILON_STEPS
        while self._next_end_step() <= due:
            run = heapq.heappop(self._ends)[3]
            self._leave(run)
            if not run.is_last:
                self._memory.rest(run.chunk.request, run.chunk.num_context_tokens + run.target)
            self._emit(run, run.target, ChunkEnd.STOP if run.is_last else ChunkEnd.LIMIT)

    def _finish_prefill(self) -> None:
        if self._steps + _EPSILON_STEPS < self._prefill_end_step:
            return
        for _ in range(self._prefill_batch):
            run = self._prefilling.popleft()
            self._prefilling_tokens -= run.context
            self._enter(run)
        self._prefill_batch = 0
        self._prefill_end_step = math.inf

    def _set_step_time(self) -> None:
        """Cost of the coming steps; a new piece of prefill starts if none is under way."""
        num_running = len(self._running)
        tokens_per_request = 1.0
        if num_running and not self._depths.off:
            drafted = self._num_probes * self._depths.probes
            drafted += (num_running - self._num_probes) * self._depths.others
            tokens_per_request += drafted / num_running
        room = max(256.0, MAX_BATCHED_TOKENS - num_running * tokens_per_request)
        if self._prefilling and not self._prefill_batch:
            total = 0
            for run in self._prefilling:
                if self._prefill_batch and total + run.prefill > room:
                    break
                total += run.prefill
                self._prefill_batch += 1
            self._prefill_end_step = self._steps + max(1.0, total / room)
        prefill = 0.0
        if self._prefill_batch:
            # A power of two near enough, so that step costs repeat and can be remembered.
            prefill = min(room, 2.0 ** math.ceil(math.log2(sum(self._batch_prefill()))))
        key = (num_running, round(tokens_per_request, 2), prefill)
        if key not in self._step_costs:
            self._step_costs[key] = self._cost.step(*key)
        self._step_time = self._step_costs[key]

    def _batch_prefill(self) -> list[int]:
        return [self._prefilling[i].prefill for i in range(self._prefill_batch)]

    def _set_alarm(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        assert self._loop is not None, "alarm before start"
        when_s = math.inf
        if self._running or self._prefilling:
            num_steps = min(self._next_end_step(), self._prefill_end_step) - self._steps
            if self._gain > 0.0:
                free = self._limits.kv_tokens - self._used_tokens()
                num_steps = min(num_steps, max(free, 0.0) / self._gain + 2 * _EPSILON_STEPS)
            when_s = self._at_s + self._seconds(max(num_steps, 0.0))
        if self._loading:
            when_s = min(when_s, self._loading[0][0])
        if self._speculation is not None and self._running:
            when_s = min(when_s, self._reviewed_s + DEPTH_REVIEW_S)
        if when_s < math.inf:
            self._timer = self._loop.call_at(when_s, self._on_timer)

    # -- speculation -------------------------------------------------------------------------------------------------

    def _review_depths(self) -> None:
        """Choose draft depths anew when the batch or the siblings have changed enough."""
        if self._speculation is None or not self._running:
            return
        num_running = len(self._running)
        steady = abs(num_running - self._reviewed_batch) * 8 <= self._reviewed_batch
        if steady and self._at_s < self._reviewed_s + DEPTH_REVIEW_S:
            return
        self._reviewed_s, self._reviewed_batch = self._at_s, num_running
        rates = {
            group: self._speculation.acceptance(self._progress, group)
            for group in {run.chunk.group for run in self._running.values()}
        }
        mean = sum(rates[run.chunk.group] for run in self._running.values()) / num_running
        self._depths = self._speculation.depths(
            self._cost, self._num_probes, num_running - self._num_probes, self._context, round(mean, 3)
        )
        self._gain = 0.0
        for run in self._running.values():
            depth = self._depths.probes if run.chunk.is_probe else self._depths.others
            rate = _rate(rates[run.chunk.group], depth)
            if rate != run.rate:
                self._set_rate(run, rate)
            self._gain += rate
        # A review touches most of the batch: one heap of what is left costs less than skipping stale entries.
        self._ends = [(run.end_step, request, run.version, run) for request, run in self._running.items()]
        heapq.heapify(self._ends)

    def _set_rate(self, run: _Run, rate: float) -> None:
        produced = self._produced(run)
        run.context += produced - run.produced
        run.produced, run.entered_step = produced, self._steps
        run.rate = rate
        run.end_step = self._steps + (run.target - produced) / rate

    # -- news --------------------------------------------------------------------------------------------------------

    def _emit(self, run: _Run, num_tokens: int, end: ChunkEnd) -> None:
        assert self._sink is not None, "output before start"
        chunk = run.chunk
        self._in_flight.discard(chunk.request)
        self._progress.stopped(chunk.group, finished=end is ChunkEnd.STOP)
        self._sink(ChunkOutput(chunk.request, chunk.attempt, self._id, num_tokens, end=end))

    def _report(self) -> None:
        num_running = len(self._running)
        drafted = 0.0
        if num_running and not self._depths.off:
            drafted = self._num_probes * self._depths.probes
            drafted = (drafted + (num_running - self._num_probes) * self._depths.others) / num_running
        self._events(
            InstanceState(
                self._at_s,
                self._id,
                num_running + len(self._prefilling),
                len(self._waiting) + len(self._loading),
                int(self._used_tokens()),
                drafted,
                self._gain / num_running if num_running else 1.0,
            )
        )
