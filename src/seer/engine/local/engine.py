# SPDX-License-Identifier: Apache-2.0
"""The engine step: plan, lay out, compute, sample, settle, report.

Synchronous and single-threaded. instance.py adds the thread and the event loop. The clock is read only to measure
steps.

Invariants
  1. Every added chunk leads to exactly one output with `end` set, and its tokens are reported once, in order.
  2. A block is registered, and offered to the pool, only when all its tokens are final and their KV was computed
     under the current weights version. Blocks that are not full are registered when their chunk leaves.
  3. A token that is outside the vocabulary or has no finite log-probability is never appended: the step raises.
  4. The KV of a rejected draft node is in scratch, or in its chunk's own blocks after the computed positions. It is
     never in a sealed block and is never attended to.
"""

from __future__ import annotations

import itertools
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from seer.drafting.base import FollowsGroups, OpensSessions
from seer.engine.admission import refuse_impossible
from seer.engine.local.active import ActiveChunk, activate
from seer.engine.local.batch import Work
from seer.engine.local.batch_scheduler import BatchScheduler, Loads, draft_asks
from seer.engine.local.model import Model
from seer.engine.local.part_blocks import keep_part, known_part
from seer.engine.local.runner import DraftedSteps, Runner
from seer.engine.local.sampling import Samples
from seer.engine.local.shared import SharedWeights
from seer.engine.local.tokenizer import decoder
from seer.engine.local.tree_walk import Walk, walk
from seer.kvpool.keys import Namespace
from seer.speculation.step_report import StepObserver, StepReport
from seer.types import Attempt, Chunk, ChunkEnd, ChunkOutput, Lease

GOES_ON = (ChunkEnd.LIMIT, ChunkEnd.PARKED, ChunkEnd.STOP)
"""Ends after which a request may go on: it has tokens to generate, or an environment that answers."""


class Engine:
    """Continuous batching over one model and one KV cache."""

    def __init__(
        self,
        instance: int,
        *,
        model: Model,
        runner: Runner,
        scheduler: BatchScheduler,
        shared: SharedWeights,
        namespace: Namespace,
        folder: Path,
        stream_tokens: int,
        on_step: StepObserver | None = None,
    ) -> None:
        self.instance = instance
        self.model = model
        self.runner = runner
        self.scheduler = scheduler
        self.shared = shared
        self.namespace = namespace
        self.folder = folder
        """The model's; its tokenizer is for stop strings."""
        self.stream_tokens = stream_tokens
        self.on_step = on_step
        self.num_steps = self.num_drafted = self.num_accepted = self.num_near_ties = 0
        self.num_missed_tokens = 0
        """Tokens of continued requests whose KV the pool no longer had, so that they were computed again."""

    @property
    def busy(self) -> bool:
        """Whether any chunk runs or waits."""
        return bool(self.scheduler.running or self.scheduler.waiting)

    def step(self) -> list[ChunkOutput]:
        """Advance every running chunk by one forward pass, or by several where no other work can interfere."""
        started, captured = time.perf_counter(), self.runner.num_captured
        works = self.scheduler.plan()
        done = self._compute(works)
        loads = self.scheduler.take_loads()
        self.num_missed_tokens += loads.num_missed_tokens
        self.num_steps += done.num_steps
        self.num_drafted += done.num_drafted
        self.num_accepted += done.num_accepted
        if self.on_step is not None:
            duration_s = time.perf_counter() - started - loads.seconds
            self.on_step(_report(works, done, duration_s, loads, has_captured=self.runner.num_captured > captured))
        return self.collect(works)

    def _compute(self, works: list[Work]) -> StepResult:
        """Several forward passes at once where every chunk decodes and the runner can; else one forward pass."""
        scheduler, allowance = self.scheduler, self.scheduler.allow(works)
        # A session shows the drafter every token, also those after a stop string.
        stop_strings = any(work.active.stops is not None for work in works)
        if len(works) < len(scheduler.running):
            scheduler.draft(works, allowance)
            scheduler.add_contexts(works)
        elif not allowance.most:
            num_steps = self.runner.burst_length(works)
            if num_steps > 1:
                return self.settle_burst(works, self.runner.burst(works, num_steps))
        elif isinstance(scheduler.drafter, OpensSessions) and self.runner.burst_length(works) > 1 and not stop_strings:
            session = scheduler.drafter.open_session(draft_asks(works, allowance))
            # A waiting chunk can enter as soon as one ends.
            until_one_ends = bool(scheduler.waiting)
            return self.settle_drafts(
                works, self.runner.run_drafted(works, session, allowance, until_one_ends=until_one_ends)
            )
        else:
            scheduler.draft(works, allowance)
        return self.settle(works, self.runner.run(works))

    # Chunks enter and end

    def add(self, chunk: Chunk) -> None:
        """Queue a chunk. The drafter learns what earlier chunks of its response generated."""
        decode = decoder(self.folder) if chunk.sampling.stop else None
        active = activate(chunk, self.namespace, self.model.config.eos_token_ids, decode)
        if isinstance(self.scheduler.drafter, FollowsGroups):
            self.scheduler.drafter.register(chunk.group, chunk.request, active.tokens[: chunk.num_prompt_tokens])
        if self.scheduler.drafter is not None and active.num_response:
            self.scheduler.drafter.observe(
                chunk.group, chunk.request, active.tokens[chunk.num_prompt_tokens :], start=0
            )
        active.part = known_part(active, self.namespace)
        self.scheduler.add(active)

    def extend(self, leases: Sequence[Lease]) -> None:
        """Let chunks generate more."""
        by_attempt = self._by_attempt()
        for lease in leases:
            active = by_attempt.get((lease.request, lease.attempt))
            if active is not None and not active.is_parked:
                active.max_tokens = max(active.max_tokens, lease.max_tokens)

    def park(self, attempts: Sequence[Attempt]) -> list[ChunkOutput]:
        """End chunks at the end of the block they are in: full blocks stay in the cache and in the pool."""
        by_attempt = self._by_attempt()
        found = [by_attempt[attempt] for attempt in attempts if attempt in by_attempt]
        return [self._finish(active, ChunkEnd.PARKED) for active in found if not self._goes_on(active)]

    @staticmethod
    def _goes_on(active: ActiveChunk) -> bool:
        """Cut the lease of a chunk that is in the middle of a block to its end; False if it can end now."""
        more = active.tokens_to_block_end()
        if not more or not active.decoding:
            return False
        active.is_parked = True
        active.max_tokens = min(active.max_tokens, active.num_generated + more)
        return True

    def _by_attempt(self) -> dict[tuple[int, int], ActiveChunk]:
        return {(active.chunk.request, active.chunk.attempt): active for active in self.scheduler.all_chunks()}

    def abort(self, request: int) -> list[ChunkOutput]:
        """End a request's chunk now. Its output holds the tokens not yet reported."""
        found = [active for active in self.scheduler.all_chunks() if active.chunk.request == request]
        return [self._finish(active, ChunkEnd.ABORTED) for active in found]

    def end_all(self, end: ChunkEnd, error: str | None = None) -> list[ChunkOutput]:
        """End every chunk, because the engine closes or failed."""
        return [self._finish(active, end, error) for active in list(self.scheduler.all_chunks())]

    # After the forward pass

    def settle(self, works: Sequence[Work], samples: Samples) -> StepResult:
        """After one forward pass: append the tokens, move accepted nodes' KV, seal full blocks."""
        source: list[int] = []
        target: list[int] = []
        num_emitted = num_drafted = num_accepted = 0
        for work in works:
            work.active.num_computed += work.num_tokens - (1 if work.samples else 0)
            if work.samples:
                way = self._advance(work, samples, source, target)
                num_emitted += len(way.rows)
                num_drafted += len(work.tree.tokens) if work.tree else 0
                num_accepted += len(way.nodes)
        if source:
            self.model.ops.move(source, target)
        for work in works:
            self._seal(work.active)
        self._export(works)
        self.num_near_ties += samples.num_near_ties
        num_batched_tokens = sum(work.num_batched_tokens for work in works)
        return StepResult(1, num_batched_tokens, num_emitted, num_drafted, num_accepted)

    def settle_burst(self, works: Sequence[Work], steps: Sequence[Samples]) -> StepResult:
        """After several decoding steps: append each chunk's tokens up to its stop token or limit."""
        num_emitted = 0
        for index, work in enumerate(works):
            active = work.active
            tokens = [samples.tokens[index] for samples in steps][: active.num_room]
            stop = next((at for at, token in enumerate(tokens) if token in active.stop_ids), None)
            count = len(tokens) if stop is None else stop + 1
            until = active.new_until_stop(tokens[:count])
            count = count if until is None else until
            self._append(
                active,
                tokens[:count],
                [samples.logprobs[index] for samples in steps[:count]],
                [samples.raw_logprobs[index] for samples in steps[:count]],
                stopped=stop is not None or until is not None,
            )
            active.num_computed += count
            self._seal(active)
            num_emitted += count
        self._export(works)
        self.num_near_ties += sum(samples.num_near_ties for samples in steps)
        return StepResult(len(steps), len(works), num_emitted)

    def settle_drafts(self, works: Sequence[Work], steps: DraftedSteps) -> StepResult:
        """After several verification steps: append the tokens. The runner has moved accepted nodes' KV already."""
        num_emitted = num_drafted = num_accepted = 0
        for work, burst in zip(works, steps.chunks, strict=True):
            active, tokens = work.active, burst.tokens
            self._append(active, tokens, burst.logprobs, burst.raw_logprobs, stopped=burst.stopped, observed=True)
            active.num_computed += len(tokens)
            active.num_drafted += burst.num_drafted
            active.num_accepted += burst.num_accepted
            self._seal(active)
            num_emitted += len(tokens)
            num_drafted += burst.num_drafted
            num_accepted += burst.num_accepted
        self._export(works)
        self.num_near_ties += steps.num_near_ties
        num_batched_tokens = round(steps.num_batched_tokens / steps.num_steps)
        return StepResult(steps.num_steps, num_batched_tokens, num_emitted, num_drafted, num_accepted)

    def _advance(self, work: Work, samples: Samples, source: list[int], target: list[int]) -> Walk:
        """Append one chunk's accepted tokens; add to `source` and `target` the slots of KV that must move."""
        active, first = work.active, work.first_sample
        num_nodes = len(work.tree.tokens) if work.tree else 0
        sampled = samples.tokens[first : first + 1 + num_nodes]
        way = walk(work.tree, sampled, active.num_room, active.stop_ids)
        until = active.new_until_stop([sampled[row] for row in way.rows])
        way = way if until is None else way.cut(until)
        tokens = self.scheduler.cache.block_size
        for depth, node in enumerate(way.nodes):
            position = len(active.tokens) + depth
            assert work.node_slots is not None, "a tree with accepted nodes was laid out"
            computed, own = work.node_slots[node], active.blocks[position // tokens] * tokens + position % tokens
            if computed != own:
                source.append(computed)
                target.append(own)
        self._append(
            active,
            [sampled[row] for row in way.rows],
            [samples.logprobs[first + row] for row in way.rows],
            [samples.raw_logprobs[first + row] for row in way.rows],
            stopped=way.stopped,
        )
        active.num_computed += 1 + len(way.nodes)
        active.num_drafted += num_nodes
        active.num_accepted += len(way.nodes)
        return way

    def _append(
        self,
        active: ActiveChunk,
        tokens: list[int],
        logprobs: list[float],
        raw_logprobs: list[float],
        *,
        stopped: bool,
        observed: bool = False,
    ) -> None:
        """Append final tokens, note the end, and let the drafter observe them unless it has."""
        start = active.num_response
        refuse_impossible(
            active.chunk.request,
            len(active.tokens),
            tokens,
            logprobs,
            raw_logprobs,
            vocab_size=self.model.config.vocab_size,
        )
        active.append(tokens, logprobs, raw_logprobs)
        if stopped:
            active.end, active.stop_token = ChunkEnd.STOP, tokens[-1] if tokens[-1] in active.stop_ids else None
        elif active.num_remaining == 0:
            active.end = ChunkEnd.PARKED if active.is_parked else ChunkEnd.LIMIT
        if self.scheduler.drafter is not None and not observed:
            self.scheduler.drafter.observe(active.chunk.group, active.chunk.request, tokens, start=start)

    def _seal(self, active: ActiveChunk) -> None:
        """Register the blocks that are now full and computed."""
        num_full = active.num_computed // self.scheduler.cache.block_size
        for index in range(active.num_sealed, num_full):
            self.scheduler.blocks.seal(active.blocks[index], active.keys[index])
        active.num_sealed = max(active.num_sealed, num_full)

    def _export(self, works: Sequence[Work]) -> None:
        """Offer newly sealed blocks of all chunks to the pool in one call: on a GPU each call waits for the device."""
        if self.scheduler.pool is None:
            return
        keys: list[bytes] = []
        blocks: list[int] = []
        owners: list[str] = []
        fresh_blocks: list[tuple[ActiveChunk, int]] = []
        for active in (work.active for work in works):
            fresh = slice(active.num_exported, active.num_sealed)
            if fresh.start < fresh.stop:
                keys += active.keys[fresh]
                blocks += active.blocks[fresh]
                owners += [str(active.chunk.request)] * (fresh.stop - fresh.start)
                active.num_exported = active.num_sealed
                fresh_blocks.append((active, fresh.stop - fresh.start))
        if keys:
            taken = iter(self.scheduler.cache.export(self.scheduler.pool, keys, blocks, owners))
            for active, count in fresh_blocks:
                held = sum(itertools.takewhile(bool, [next(taken) for _ in range(count)]))
                if active.num_pooled == active.num_exported - count:
                    active.num_pooled += held

    # Reporting

    def _report_after(self, active: ActiveChunk) -> int:
        """Tokens to report together. The first report comes earlier, at another step for each of those that entered
        together: otherwise all would report at the same steps, and the driver would answer all of them late.
        """
        return self.stream_tokens if active.num_reported else 1 + active.chunk.request % self.stream_tokens

    def collect(self, works: Sequence[Work]) -> list[ChunkOutput]:
        """Outputs of the chunks that ended or have `stream_tokens` to report. Chunks that ended leave."""
        outputs = []
        for work in works:
            active = work.active
            if active.end is not None:
                outputs.append(self._finish(active, active.end))
            elif active.num_unreported >= self._report_after(active):
                outputs.append(active.take_output(self.instance, self.namespace.weights_version))
        return outputs

    def _finish(self, active: ActiveChunk, end: ChunkEnd, error: str | None = None) -> ChunkOutput:
        active.end, active.error = end, error
        scheduler, chunk = self.scheduler, active.chunk
        is_full = active.num_sampled >= chunk.sampling.max_tokens
        if end in GOES_ON and not is_full and (end is not ChunkEnd.STOP or chunk.has_turns):
            keep_part(active, self.namespace, scheduler.cache, scheduler.blocks, scheduler.pool)
        scheduler.leave(active)
        if scheduler.drafter is not None:
            scheduler.drafter.forget(chunk.request)
        if scheduler.pool is not None and (end is ChunkEnd.STOP or is_full) and not chunk.has_turns:
            # The request has ended and is not continued: the pool may drop its KV.
            scheduler.pool.free(str(chunk.request))
        return active.take_output(self.instance, self.namespace.weights_version)


@dataclass(frozen=True, slots=True)
class StepResult:
    """Counts of one call of `Engine.step`."""

    num_steps: int
    num_batched_tokens: int
    """Mean per forward pass."""
    num_emitted: int
    num_drafted: int = 0
    num_accepted: int = 0


def _report(
    works: Sequence[Work], done: StepResult, duration_s: float, loads: Loads, *, has_captured: bool
) -> StepReport:
    return StepReport(
        duration_s=duration_s / done.num_steps,
        num_steps=done.num_steps,
        num_running=len(works),
        num_batched_tokens=done.num_batched_tokens,
        num_prefill_tokens=sum(work.num_tokens for work in works if work.num_tokens > 1),
        mean_context_tokens=sum(len(work.active.tokens) for work in works) // max(1, len(works)),
        num_emitted=done.num_emitted,
        num_drafted=done.num_drafted,
        num_accepted=done.num_accepted,
        load_s=loads.seconds,
        loaded_bytes=loads.num_bytes,
        far_load_s=loads.far.seconds,
        far_loaded_bytes=loads.far.num_bytes,
        has_captured=has_captured,
    )
