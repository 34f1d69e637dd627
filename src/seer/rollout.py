# SPDX-License-Identifier: Apache-2.0
"""The rollout loop: the story of the system on one page.

Admit the groups. Let the scheduler extend the leases of requests that should stay, and fill the instances with chunks.
Wait for outputs, apply each to its request, and learn the lengths of those that finish. A request whose chunk ended
waits in the buffer, tied to no instance, until the scheduler picks it again. Groups are yielded as they complete, so
that rewards can start early.

A request with turns that stops is handed over (`on_turn`), holds nothing, and comes back by `answer`, or ends by
`conclude` or `fail_at_tool`.

A run admits its groups and ends when they have ended. A session (seer.runs.session) admits at any time and ends when it
is closed. Instances may come and go in both.

The loop knows neither real time nor any engine. On an event loop with a virtual clock, over instances that are cost
models, the same code is the simulator.

Waits for                                    unblocked by
  outputs (inbox.py)                           an output, `admit`, `seal`, `cancel`, a lost, returned or new instance,
                                               the answer of an environment, the stall deadline, which runs while a
                                               request waits or is in flight and the instances are not `frozen`
"""

from __future__ import annotations

import asyncio
from collections import defaultdict
from collections.abc import AsyncIterator, Callable, Iterable, Mapping, Sequence

from seer.buffer import Request, RequestBuffer, RequestState
from seer.context import Context
from seer.engine.base import Instance, node_of
from seer.errors import ConfigError, InstanceError
from seer.fleet import Fleet
from seer.inbox import Inbox
from seer.metrics.events import Answered, Asked, Ended, EventSink, Extended, Placed, Queued, Started, Stopped, discard
from seer.prefetch import Prefetcher
from seer.scheduling.base import Scheduler
from seer.types import Attempt, ChunkEnd, ChunkOutput, Group, GroupResult, Lease, Restored

FILL_S = 0.02
FILL_STARTS = 64
"""After this time the loop stops starting requests, to look at outputs and send what it has started: it looks at the
clock every FILL_STARTS. In virtual time decisions take none."""


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
        gather_s: float = 0.0,
        on_tokens: Callable[[Request, ChunkOutput], None] | None = None,
        on_turn: Callable[[Request], None] | None = None,
    ) -> None:
        self.instances = list(instances)
        self.scheduler = scheduler
        self.context = context
        self.buffer = RequestBuffer(weights_version)
        self.fleet = Fleet([instance.limits for instance in instances], [node_of(instance) for instance in instances])
        self._events = events
        self._max_failures = max_failures
        """A request fails for good after this many failed chunks."""
        self._stall_deadline_s = stall_deadline_s
        """The rollout fails if no instance sends an output for this long; None waits for ever."""
        self._inbox = Inbox(gather_s)
        self._is_frozen = False
        self._failures: dict[int, int] = {}
        self._low: dict[int, Request] = {}  # in flight, with a lease that runs low
        self._on_tokens = on_tokens
        """Gets every output with tokens, once and in order, before its request ends."""
        self._on_turn = on_turn
        """Gets every request that is handed over to its environment."""
        self._restored_at_tool: set[int] = set()  # not admitted to the scheduler yet
        self._prefetcher = Prefetcher(scheduler, self.instances, weights_version)
        self._is_sealed = False
        self._cancelling = False
        self._cancelled: set[int] = set()  # in flight, and to end with the tokens they have

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
        self.admit(list(groups), restored or {})
        self.seal()
        num_complete = 0
        async for complete in self.serve():
            num_complete += 1
            yield complete
            if num_complete == enough_groups:
                self.cancel()

    async def serve(self) -> AsyncIterator[GroupResult]:
        """Work on what is admitted, now or later, until the loop is sealed and every request has ended."""
        self._say_where(self.instances)
        while not (self._is_sealed and self.buffer.drained):
            self._renew_leases()
            is_filled = self._fill_instances()
            outputs = await self._take_outputs(wait=is_filled)
            now_s = self._now_s()
            for output in outputs:
                self._apply(output, now_s)
            for complete in self.buffer.take_complete_groups():
                yield complete
        for cancelled in self.buffer.take_complete_groups():
            yield cancelled

    def _renew_leases(self) -> None:
        """Let requests stay or leave, as the scheduler says: one message of either kind per instance."""
        if self._cancelling:
            return
        now_s = self._now_s()
        leases: defaultdict[int, list[Lease]] = defaultdict(list)
        parked: defaultdict[int, list[Attempt]] = defaultdict(list)
        renewal = self.scheduler.renew(list(self._low.values()), self.fleet)
        if renewal.extended:
            self.fleet.extend((plan.request, plan.num_blocks) for plan in renewal.extended)
        for plan in renewal.extended:
            request, instance = plan.request, plan.request.instance
            assert instance is not None, f"{request} is not in flight"
            leases[instance].append(self.buffer.extend(request, plan.num_tokens))
            self._low.pop(request.id, None)
            self._events(Extended(now_s, request.id, instance, plan.num_tokens, request.num_generated))
        for request in renewal.parked:
            assert request.instance is not None, f"{request} is not in flight"
            parked[request.instance].append(Attempt(request.id, request.attempt))
        for instance, granted in leases.items():
            self.instances[instance].extend(granted)
        for instance, attempts in parked.items():
            self.instances[instance].park(attempts)

    def _fill_instances(self) -> bool:
        """Start what fits. False if there was more than FILL_S allows: the rest follows after the outputs that wait."""
        now_s, num_started = self._now_s(), 0
        while (plan := self.scheduler.next(self.fleet)) is not None:
            request = plan.request
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
            num_started += 1
            if not num_started % FILL_STARTS and self._now_s() - now_s > FILL_S:
                return False
        self._prefetcher.look_ahead(self.fleet)
        # While instances are lost, the others may be too small for those that wait.
        may_wait = not self.buffer.num_waiting or self._inbox or self.fleet.num_alive < len(self.fleet)
        assert self.buffer.num_in_flight or may_wait, (
            f"{self.buffer.num_waiting} requests wait, none is in flight, and the scheduler starts none"
        )
        return True

    async def _take_outputs(self, *, wait: bool) -> list[ChunkOutput]:
        if not wait:
            await asyncio.sleep(0)  # what was started is sent, and what has come is read
        elif not self.buffer.has_complete_groups:  # restored ones, for instance
            await self._inbox.wait(self._stall_deadline_s if self._owes_output else None, self._stall_cause)
        return self._inbox.take()

    def _apply(self, output: ChunkOutput, now_s: float) -> None:
        request = self.buffer.apply(output, now_s)
        if request is None:
            return
        if self._on_tokens is not None and output.num_tokens:
            self._on_tokens(request, output)
        if output.end is None:
            if request.runs_low and request.id not in self._cancelled:
                self._low[request.id] = request
            return
        self._low.pop(request.id, None)
        self.fleet.give_back(request)
        self._events(Stopped(now_s, request.id, output.instance, request.num_generated, output.end.value))
        if request.state is RequestState.FINISHED:
            self._learn(request, now_s)
        elif request.state is RequestState.AT_TOOL:
            self.scheduler.away(request)
            if self._cancelling or request.id in self._cancelled:
                self._end_cancelled(request, now_s)
            else:
                self._hand_over(request, now_s)
        elif output.end is ChunkEnd.FAILED and self._record_failure(request):
            self.buffer.fail(request, output.error or "the instance gave no reason", now_s)
            self._learn(request, now_s)
        else:
            self._wait_again(request, now_s)

    def seal(self) -> None:
        """Nothing more is admitted: `serve` ends when every request has."""
        self._is_sealed = True
        self._inbox.wake()

    def unseal(self) -> None:
        """More may be admitted after all; `serve` must not have ended."""
        self._is_sealed = False

    def let_go(self) -> None:
        """Make no more calls: it has ended. Else its maker and it hold each other, and all tokens, until Python's
        collector looks.
        """
        self._events, self._on_tokens, self._on_turn = discard, None, None

    def forget(self, group: Group) -> None:
        """Drop what is kept of a group that was handed out."""
        for request in self.buffer.members(group.id):
            self._failures.pop(request.id, None)
            self._prefetcher.forget(request.id)
        self.buffer.forget(group.id)

    def forget_family(self, family: int) -> None:
        """No group of this family comes any more; all that came have ended."""
        self.context.forget(family)
        self.scheduler.forget(family)

    def on_output(self, output: ChunkOutput) -> None:
        """Take an output; instances are started with this as their sink."""
        self._inbox.put(output)

    def cancel(self) -> None:
        """End every request that has not ended; those in flight end once their last tokens have arrived."""
        self._cancelling = True
        for request in self.buffer.requests():
            if request.instance is not None:
                self.instances[request.instance].abort(request.id)
            elif not request.ended:
                self._end_cancelled(request, self._now_s())
        self._inbox.wake()

    def cancel_request(self, request: Request) -> None:
        """End one request soon, with the tokens that it has; nothing happens if it has ended."""
        if request.ended:
            return
        if request.instance is None:
            self._end_cancelled(request, self._now_s())
        else:
            self._cancelled.add(request.id)
            self._low.pop(request.id, None)
            self.instances[request.instance].abort(request.id)
        self._inbox.wake()

    def freeze(self, is_frozen: bool) -> None:
        """Say that the instances are paused and owe no output, or that they go on; the stall deadline starts anew."""
        self._is_frozen = is_frozen
        self._inbox.wake()

    def add_instance(self, instance: Instance) -> None:
        """A new instance takes work from now on; its id is the next one."""
        assert instance.id == len(self.instances), f"instance {instance.id} follows {len(self.instances) - 1}"
        self.fleet.add(instance.limits, node_of(instance))
        self.instances.append(instance)
        self._say_where([instance])
        self._inbox.wake()

    def retire_instance(self, instance: int) -> None:
        """Give an instance no more work; its requests are parked, and go on elsewhere without a token lost."""
        self.fleet.retire(instance)
        here = [request for request in self.buffer.requests() if request.instance == instance]
        self.instances[instance].park([Attempt(request.id, request.attempt) for request in here])
        for request in here:
            self._low.pop(request.id, None)
        self._fail_unfit()
        self._inbox.wake()

    def lose_instance(self, instance: int) -> None:
        """An instance is lost: its requests wait again, with every token received so far. Again: nothing happens."""
        now_s = self._now_s()
        for lost in self.fleet.lose(instance):
            request = self.buffer[lost]
            self._low.pop(lost, None)
            self.buffer.lose(request)
            self._events(Stopped(now_s, lost, instance, request.num_generated, "lost"))
            self._wait_again(request, now_s)
        self._inbox.wake()

    def rejoin_instance(self, instance: int) -> None:
        """A lost instance is back, with empty KV memory; where it now runs it may have other limits."""
        self.fleet.join(instance, self.instances[instance].limits)
        self.fleet.nodes.place(instance, node_of(self.instances[instance]))
        self._fail_unfit()
        self._say_where([self.instances[instance]])
        self._inbox.wake()

    def admit(
        self, groups: Sequence[Group], restored: Mapping[tuple[int, int], Restored] | None = None
    ) -> list[Request]:
        """Take groups in, at any time before `seal`; refused as a whole if one of them fits on no instance."""
        assert not self._is_sealed, "the loop was sealed"
        longest = self.fleet.longest_request_tokens
        for group in groups:
            if _needed_tokens(group) > longest:
                raise ConfigError(
                    f"group {group.id}: prompt and max_tokens make {_needed_tokens(group)} tokens, an instance holds "
                    f"{longest}",
                    hint="lower max_tokens, or give instances more KV memory",
                )
        now_s = self._now_s()
        admitted = self.buffer.admit(groups, now_s)
        for request in admitted:
            group = request.group
            past = restored.get((group.id, request.index)) if restored else None
            if past is not None:
                self.buffer.restore(request, past, now_s)
            num_prompt_tokens, num_generated = group.num_prompt_tokens, request.num_generated
            self._events(Queued(now_s, request.id, group.family, request.index, num_prompt_tokens, num_generated))
            if past is not None:
                self._take_up(request, past, now_s)
        self.scheduler.admit([one for one in admitted if one.state is RequestState.WAITING], self.fleet)
        self._inbox.wake()
        return admitted

    def answer(self, request: Request, token_ids: Sequence[int] | None, num_tokens: int | None = None) -> None:
        """The environment of a request at its tool gave tokens, or their number in simulation: it goes on."""
        now_s = self._now_s()
        num_tokens = len(token_ids) if token_ids is not None else num_tokens or 0
        self.buffer.answer(request, token_ids, num_tokens, now_s)
        self._events(Answered(now_s, request.id, num_tokens, request.num_turns))
        if request.id in self._restored_at_tool:
            self._restored_at_tool.remove(request.id)
            self.scheduler.admit([request], self.fleet)
        else:
            self._wait_again(request, now_s)
        self._inbox.wake()

    def conclude(self, request: Request, reward: float | None) -> None:
        """The environment of a request at its tool ended the response."""
        now_s = self._now_s()
        self.buffer.conclude(request, reward, now_s)
        self._learn(request, now_s)
        self._inbox.wake()

    def fail_at_tool(self, request: Request, error: str) -> None:
        """The environment of a request at its tool failed, and with it the response."""
        now_s = self._now_s()
        self.buffer.fail(request, error, now_s)
        self._learn(request, now_s)
        self._inbox.wake()

    def _say_where(self, instances: Sequence[Instance]) -> None:
        """Events say where instances are if they are not all on the driver's machine."""
        now_s = self._now_s()
        for instance in instances:
            node = node_of(instance)
            if node is not None:
                self._events(Placed(now_s, instance.id, node))

    def _hand_over(self, request: Request, now_s: float) -> None:
        assert self._on_turn is not None, f"{request} has turns, and nothing takes them"
        self._events(Asked(now_s, request.id, request.num_turns))
        self._on_turn(request)

    def _take_up(self, request: Request, past: Restored, now_s: float) -> None:
        """Go on with a restored request that waits for its tool, or has ended."""
        if request.state is RequestState.AT_TOOL:
            self._restored_at_tool.add(request.id)
            self._hand_over(request, now_s)
        elif past.finish_reason is not None:
            self.context.observe_finished(request, self.buffer.members(request.group.id))
            self._events(Ended(now_s, request.id, request.num_generated, past.finish_reason.value))

    def _wait_again(self, request: Request, now_s: float) -> None:
        if self._cancelling or request.id in self._cancelled:
            self._end_cancelled(request, now_s)
        elif _most_tokens(request) > self.fleet.longest_request_tokens:
            self._end_unfit(request, now_s)
        else:
            self.scheduler.requeue(request)

    def _fail_unfit(self) -> None:
        """Instances left for good, or came back smaller: end what waits and was admitted for a larger one."""
        now_s, longest = self._now_s(), self.fleet.longest_request_tokens
        for request in list(self.buffer.requests()):
            if request.state is RequestState.WAITING and _most_tokens(request) > longest:
                self._end_unfit(request, now_s)

    def _end_unfit(self, request: Request, now_s: float) -> None:
        needed, longest = _most_tokens(request), self.fleet.longest_request_tokens
        error = f"it may grow to {needed} tokens; of the instances that are left, the largest holds {longest}"
        self.buffer.fail(request, error, now_s)
        self._learn(request, now_s)

    def _end_cancelled(self, request: Request, now_s: float) -> None:
        self.buffer.cancel(request, now_s)
        self._learn(request, now_s)

    def _learn(self, request: Request, now_s: float) -> None:
        assert request.finish_reason is not None, f"{request} has not ended"
        self._cancelled.discard(request.id)
        self.fleet.nodes.forget(request.id)
        if request.finish_reason.is_complete:
            self.context.observe_finished(request, self.buffer.members(request.group.id))
        self._events(Ended(now_s, request.id, request.num_generated, request.finish_reason.value))
        if request.id in self._restored_at_tool:
            self._restored_at_tool.remove(request.id)
        else:
            self.scheduler.finished(request)

    def _record_failure(self, request: Request) -> bool:
        self._failures[request.id] = self._failures.get(request.id, 0) + 1
        return self._failures[request.id] >= self._max_failures

    @property
    def _owes_output(self) -> bool:
        return not self._is_frozen and bool(self.buffer.num_in_flight or self.buffer.num_waiting)

    def _stall_cause(self) -> str:
        running = {request.instance for request in self.buffer.requests() if request.instance is not None}
        return (
            f"waiting for any output ({self.buffer.num_in_flight} requests in flight on instances {sorted(running)}, "
            f"{self.buffer.num_waiting} waiting)"
        )

    @staticmethod
    def _now_s() -> float:
        return asyncio.get_running_loop().time()


def _needed_tokens(group: Group) -> int:
    """The context of a member at its longest."""
    return max(group.num_prompt_tokens + group.sampling.max_tokens, group.max_context_tokens or 0)


def _most_tokens(request: Request) -> int:
    """What it has and may still generate; an environment gives more only if there is room."""
    return request.num_tokens + request.remaining_limit
