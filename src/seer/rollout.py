# SPDX-License-Identifier: Apache-2.0
"""The rollout loop: the story of the system on one page.

Admit the groups. Let the scheduler extend the leases of requests that should stay, and fill the instances with chunks.
Wait for outputs, apply each to its request, and learn the lengths of those that finish. A request whose chunk ended
waits in the buffer, tied to no instance, until the scheduler picks it again. Groups are yielded as they complete, so
that rewards can start early.

The loop knows neither real time nor any engine. On an event loop with a virtual clock, over instances that are cost
models, the same code is the simulator.

Waits for                                    unblocked by
  outputs (`_wake`)                            an output, `cancel`, a lost or returned instance, the stall deadline
"""

from __future__ import annotations

import asyncio
from collections import defaultdict
from collections.abc import AsyncIterator, Iterable, Mapping, Sequence

from seer.buffer import Request, RequestBuffer, RequestState
from seer.context import Context
from seer.engine.base import Instance
from seer.errors import ConfigError, DeadlineExceeded, InstanceError
from seer.metrics.events import Ended, EventSink, Extended, Queued, Started, Stopped, discard
from seer.placement import Fleet
from seer.prefetch import Prefetcher
from seer.scheduling.base import Scheduler
from seer.types import Attempt, ChunkEnd, ChunkOutput, Group, GroupResult, Lease, Restored


class RolloutLoop:
    """Rolls groups out over a set of instances as a scheduler plans, under one version of the weights."""

    def __init__(
        self,
        instances: Sequence[Instance],
        scheduler: Scheduler,
        context: Context,
        *,
        weights_version: int = 0,
        events: EventSink = discard,
        max_failures: int = 3,
        stall_deadline_s: float | None = None,
    ) -> None:
        self.instances = instances
        self.scheduler = scheduler
        self.context = context
        self.buffer = RequestBuffer(weights_version)
        self.fleet = Fleet([instance.limits for instance in instances])
        self._events = events
        self._max_failures = max_failures
        """A request fails for good after this many failed chunks."""
        self._stall_deadline_s = stall_deadline_s
        """The rollout fails if no instance sends an output for this long; None waits for ever."""
        self._failures: dict[int, int] = {}
        self._low: dict[int, Request] = {}  # in flight, with a lease that runs low
        self._prefetcher = Prefetcher(scheduler, instances, weights_version)
        self._cancelling = False
        self._outputs: list[ChunkOutput] = []
        self._wake = asyncio.Event()

    async def run(
        self,
        groups: Iterable[Group],
        *,
        enough_groups: int | None = None,
        restored: Mapping[tuple[int, int], Restored] | None = None,
    ) -> AsyncIterator[GroupResult]:
        """Roll every group out to its end. With `enough_groups`, cancel the rest at that many: off-policy.

        `restored` is what an interrupted run had generated, by group and index.
        """
        self._admit(list(groups), restored or {})
        num_complete = 0
        while not self.buffer.drained:
            self._renew_leases()
            self._fill_instances()
            for output in await self._take_outputs():
                self._apply(output)
            for complete in self.buffer.take_complete_groups():
                num_complete += 1
                yield complete
            if enough_groups is not None and num_complete >= enough_groups and not self._cancelling:
                self.cancel()
        for cancelled in self.buffer.take_complete_groups():
            yield cancelled

    def on_output(self, output: ChunkOutput) -> None:
        """Take an output; instances are started with this as their sink."""
        self._outputs.append(output)
        self._wake.set()

    def cancel(self) -> None:
        """End every request that has not ended; those in flight end once their last tokens have arrived."""
        self._cancelling = True
        for request in self.buffer.requests():
            if request.instance is not None:
                self.instances[request.instance].abort(request.id)
            elif not request.ended:
                self._end_cancelled(request, self._now_s())
        self._wake.set()

    def lose_instance(self, instance: int) -> None:
        """An instance is lost: its requests wait again, with every token received so far."""
        now_s = self._now_s()
        for lost in self.fleet.lose(instance):
            request = self.buffer[lost]
            self._low.pop(lost, None)
            self.buffer.lose(request)
            self._events(Stopped(now_s, lost, instance, request.num_generated, "lost"))
            self._wait_again(request, now_s)
        self._wake.set()

    def rejoin_instance(self, instance: int) -> None:
        """A lost instance is back, with empty KV memory."""
        self.fleet.join(instance)
        self._wake.set()

    def _admit(self, groups: list[Group], restored: Mapping[tuple[int, int], Restored]) -> None:
        largest = max(limit.kv_tokens for limit in self.fleet.limits)
        longest = max(limit.max_model_len for limit in self.fleet.limits)
        for group in groups:
            needed = group.num_prompt_tokens + group.sampling.max_tokens
            if needed > min(largest, longest):
                raise ConfigError(
                    f"group {group.id}: prompt and max_tokens make {needed} tokens, "
                    f"an instance holds {min(largest, longest)}",
                    hint="lower max_tokens, or give instances more KV memory",
                )
        now_s = self._now_s()
        admitted = self.buffer.admit(groups, now_s)
        for request in admitted:
            self._events(Queued(now_s, request.id, request.group.id, request.index, request.group.num_prompt_tokens))
            past = restored.get((request.group.id, request.index))
            if past is not None:
                self._restore(request, past, now_s)
        self.scheduler.admit([request for request in admitted if not request.ended], self.fleet)

    def _restore(self, request: Request, past: Restored, now_s: float) -> None:
        self.buffer.restore(request, past.spans, past.finish_reason, now_s)
        if past.finish_reason is not None:
            self.context.observe_finished(request)
            self._events(Ended(now_s, request.id, request.num_generated, past.finish_reason.value))

    def _renew_leases(self) -> None:
        """Let requests stay or leave, as the scheduler says: one message of either kind per instance."""
        if self._cancelling:
            return
        now_s = self._now_s()
        leases: defaultdict[int, list[Lease]] = defaultdict(list)
        parked: defaultdict[int, list[Attempt]] = defaultdict(list)
        renewal = self.scheduler.renew(list(self._low.values()), self.fleet)
        for plan in renewal.extended:
            request = plan.request
            assert request.instance is not None, f"{request} is not in flight"
            self.fleet.extend(request, plan.num_blocks)
            leases[request.instance].append(self.buffer.extend(request, plan.num_tokens))
            self._low.pop(request.id, None)
            self._events(Extended(now_s, request.id, request.instance, plan.num_tokens, request.num_generated))
        for request in renewal.parked:
            assert request.instance is not None, f"{request} is not in flight"
            parked[request.instance].append(Attempt(request.id, request.attempt))
        for instance, granted in leases.items():
            self.instances[instance].extend(granted)
        for instance, attempts in parked.items():
            self.instances[instance].park(attempts)

    def _fill_instances(self) -> None:
        now_s = self._now_s()
        while (plan := self.scheduler.next(self.fleet)) is not None:
            request = plan.request
            if request.ended:
                continue
            moved_from = request.last_instance
            chunk = self.buffer.start(
                request, plan.instance, plan.max_tokens, plan.load_kv, now_s, is_lease=plan.is_lease
            )
            self.fleet.promise(
                request,
                plan.instance,
                plan.num_blocks,
                overcommit=plan.overcommit,
                shared_blocks=plan.shared_blocks,
            )
            self._events(Started(now_s, request.id, plan.instance, plan.max_tokens, moved_from, plan.load_kv))
            try:
                self.instances[plan.instance].submit(chunk)
            except InstanceError as error:
                self.on_output(
                    ChunkOutput(request.id, chunk.attempt, plan.instance, 0, end=ChunkEnd.FAILED, error=str(error))
                )
        self._prefetcher.look_ahead(self.fleet)
        assert self.buffer.num_in_flight or self.buffer.drained or self._outputs or not self.fleet.num_alive, (
            f"{self.buffer.num_waiting} requests wait, none is in flight, and the scheduler starts none"
        )

    def _apply(self, output: ChunkOutput) -> None:
        now_s = self._now_s()
        request = self.buffer.apply(output, now_s)
        if request is None:
            return
        if output.end is None:
            if request.runs_low:
                self._low[request.id] = request
            return
        self._low.pop(request.id, None)
        self.fleet.give_back(request)
        self._events(Stopped(now_s, request.id, output.instance, request.num_generated, output.end.value))
        if request.state is RequestState.FINISHED:
            self._learn(request, now_s)
        elif output.end is ChunkEnd.FAILED and self._record_failure(request):
            self.buffer.fail(request, output.error or "the instance gave no reason", now_s)
            self._learn(request, now_s)
        else:
            self._wait_again(request, now_s)

    def _wait_again(self, request: Request, now_s: float) -> None:
        if self._cancelling:
            self._end_cancelled(request, now_s)
        else:
            self.scheduler.requeue(request)

    def _end_cancelled(self, request: Request, now_s: float) -> None:
        self.buffer.cancel(request, now_s)
        self._learn(request, now_s)

    def _learn(self, request: Request, now_s: float) -> None:
        assert request.finish_reason is not None, f"{request} has not ended"
        if request.finish_reason.is_complete:
            self.context.observe_finished(request)
        self._events(Ended(now_s, request.id, request.num_generated, request.finish_reason.value))
        self.scheduler.finished(request)

    def _record_failure(self, request: Request) -> bool:
        self._failures[request.id] = self._failures.get(request.id, 0) + 1
        return self._failures[request.id] >= self._max_failures

    async def _take_outputs(self) -> list[ChunkOutput]:
        if not self._outputs:
            self._wake.clear()
            if self._stall_deadline_s is None:
                await self._wake.wait()
            else:
                try:
                    # Not `wait_for`: on Python 3.11 it can swallow a cancellation that arrives with the wake-up.
                    async with asyncio.timeout(self._stall_deadline_s):
                        await self._wake.wait()
                except TimeoutError:
                    raise DeadlineExceeded(self._stall_cause(), self._stall_deadline_s) from None
        outputs, self._outputs = self._outputs, []
        return outputs

    def _stall_cause(self) -> str:
        running = {request.instance for request in self.buffer.requests() if request.instance is not None}
        return (
            f"waiting for any output ({self.buffer.num_in_flight} requests in flight on instances {sorted(running)}, "
            f"{self.buffer.num_waiting} waiting)"
        )

    @staticmethod
    def _now_s() -> float:
        return asyncio.get_running_loop().time()
