# SPDX-License-Identifier: Apache-2.0
"""One run: prompts through the rollout loop on a fleet, and groups with text and rewards out.

The loop runs in a task of its own, so a slow consumer (a training step between two groups) does not delay generation.
All other work follows the loop's events: when a response ends it gets its text and its reward starts; when a chunk
stops it is written to the journal; when a group is whole it is kept or dropped, and the next prompts enter.

Waits for                                    unblocked by
  the next group (consumer)                    the loop, tools, rewards and `keep`, each by its deadline, the fleet's
                                               failure
  the loop's end after a cancellation          the instances' last outputs, cancel_deadline_s
  the user's code at the end (`_finish`)       the ends of its calls, a deadline (seer.runs.user_calls)
"""

from __future__ import annotations

import asyncio
import contextlib
import secrets
from collections.abc import AsyncIterator, Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING

from seer.buffer import Request, request_seed
from seer.context import Context
from seer.engine.base import Instance
from seer.engine.forced import ForcedLengths
from seer.engine.text_codec import TextCodec
from seer.errors import ConfigError
from seer.hosting.fleet import HostedFleet
from seer.kvpool.base import PoolStats
from seer.machine.collector import collected_seldom
from seer.metrics.events import Answered, Dropped, Ended, Event, EventSink, Extended, Started, Stepped, Stopped, discard
from seer.metrics.summary import Summarizer, Summary
from seer.placement import PlacementConfig
from seer.rollout import RolloutLoop
from seer.runs.conversations import Conversations, EnvironmentCalls
from seer.runs.forced_fleet import ForcedFleet
from seer.runs.group_supply import GroupSupply
from seer.runs.journal import Journal
from seer.runs.keeping import KeepCalls, KeepFunction
from seer.runs.pool_events import pool_events
from seer.runs.prompts import EncodedPrompt
from seer.runs.results import complete
from seer.runs.rewards import RewardCalls, RewardFunction
from seer.runs.user_calls import UserCalls
from seer.scheduling.registry import SchedulerSettings, make_scheduler, parse_scheduler
from seer.spread import Spread
from seer.transfer import TransferEstimate
from seer.types import GROUP_DRAFTS, Group, GroupResult, InstanceLimits, Response

if TYPE_CHECKING:
    from seer.verification.verifier import Verifier

MAX_CHUNK_TOKENS = 8192
"""The schedulers' default, chosen for a cluster."""
MIN_CHUNK_TOKENS = 128
"""Each chunk's end costs its request a few steps: a round trip to the driver, and the last block's KV again."""
GATHER_S = 0.01
"""The loop applies outputs that end no chunk this often at most: short next to what a lease that runs low has left."""

Lengths = Sequence[Sequence[int]]
"""Of each response, by group and index."""

PastResponses = Mapping[str, Sequence[Sequence[int]]]
"""Token ids of responses to a prompt in an earlier epoch, by the prompt's id."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RunOptions:
    """Settings of one run; two runs on the same fleet may differ in them."""

    scheduler: str = "seer"
    speculation: str = "auto"
    """`auto`: as the scheduler says, where it pays; `off`: never."""
    seed: int = 0
    chunk_tokens: int | None = None
    """None chooses by the longest response allowed."""
    lengths: Lengths | None = None
    """Force every response to a length, as if the model had stopped there."""
    reward: RewardFunction | None = None
    reward_deadline_s: float = 60.0
    stall_deadline_s: float = 900.0
    cancel_deadline_s: float = 30.0
    events: EventSink = discard
    journal: Journal | None = None
    verifier: Verifier | None = None
    """Gets every response as it ends; the caller starts and finishes it."""
    length_hints: Mapping[str, int] | None = None
    spread: Spread = field(default_factory=Spread)
    """What earlier runs have shown, and this one learns."""
    calls: EnvironmentCalls | None = None
    """What responses talk to between their turns."""
    max_context_tokens: int | None = None
    """Of prompt and response together, with turns; None for what an instance holds."""
    keep: KeepFunction | None = None
    keep_deadline_s: float = 60.0
    enough_groups: int | None = None
    """Groups to keep; None: all prompts are rolled out."""
    on_response: Callable[[Response], None] | None = None
    """Gets every response that has ended, once its reward is there."""
    past_responses: PastResponses = field(default_factory=dict)
    """To draft from. The engine verifies drafts, so they may come from another weights version."""


class Run:
    """One run; `groups` may be iterated once."""

    def __init__(
        self,
        fleet: HostedFleet,
        prompts: Iterable[EncodedPrompt],
        codec: TextCodec | None,
        options: RunOptions,
    ) -> None:
        self._fleet = fleet
        self._codec = codec
        self._options = options
        self._spec = parse_scheduler(options.scheduler)
        if isinstance(prompts, Sequence):
            refuse_impossible(options, prompts)
        self._supply = GroupSupply(prompts, enough=options.enough_groups)
        self._prompts: dict[int, EncodedPrompt] = {}
        """Those that have entered, by group."""
        self.groups_asked: list[Group] = []
        self._user_calls = calls = UserCalls()
        self._conversations = Conversations(codec, calls) if options.calls is not None else None
        if not self._enter(nothing_waits=True):
            raise ConfigError("there are no prompts to roll out")
        self.num_groups_wanted = options.enough_groups or (len(prompts) if isinstance(prompts, Sequence) else 0)
        self._is_cancelled = False
        self._context = Context(options.length_hints, options.spread)
        self._summarizer = Summarizer(len(fleet.instances))
        self._queue: asyncio.Queue[GroupResult | None] = asyncio.Queue()
        self._deliveries: set[asyncio.Task[None]] = set()
        self._rewards = self._keep = None
        if options.reward is not None:
            self._rewards = RewardCalls(options.reward, calls, deadline_s=options.reward_deadline_s)
        if options.keep is not None:
            self._keep = KeepCalls(options.keep, calls, deadline_s=options.keep_deadline_s)
        self._failure: Exception | None = None
        self._pump_task: asyncio.Task[None] | None = None
        self._began_s = 0.0
        self._pool_before: PoolStats | None = None
        self.loop: RolloutLoop | None = None
        self._any_complete = False
        self.num_groups_done = 0

    async def groups(self) -> AsyncIterator[GroupResult]:
        """Groups as they complete. Leaving the iteration early cancels the rest."""
        drafts = self._spec.drafts if self._options.speculation == "auto" else "none"
        past = {
            group.id: self._options.past_responses[group.key]
            for group in self.groups_asked
            if group.key is not None and group.key in self._options.past_responses
        }
        await self._fleet.begin_run(secrets.token_hex(8), drafts, past if drafts in GROUP_DRAFTS else {})
        self._pool_before = self._pool_stats()
        self.loop = loop = self._make_loop()
        self._began_s = asyncio.get_running_loop().time()
        self._pump_task = pump = asyncio.create_task(self._pump(loop))
        try:
            while (result := await self._queue.get()) is not None:
                yield result
            if self._failure is not None:
                raise self._failure
            await pump
        finally:
            await self._finish(loop, pump)

    def cancel(self) -> None:
        """End every response that has not ended; `groups` then yields the rest with what was generated, and ends."""
        self._is_cancelled = True
        if self.loop is not None:
            self.loop.cancel()
            self.loop.seal()

    def stop_group(self, group: int) -> None:
        """End the responses of a group that have not ended; what it has is handed out, as far as it is kept."""
        if self.loop is not None and group in self._prompts:
            for request in self.loop.buffer.members(group):
                self.loop.cancel_request(request)

    def summary(self) -> Summary | None:
        """The numbers of the run; None until a response has ended by itself."""
        return self._summarizer.summary() if self._any_complete else None

    def length_hints(self) -> dict[str, int]:
        """The longest response of each prompt in this run, as hints for a later epoch."""
        return self._context.as_length_hints({group.id: group for group in self.groups_asked})

    @property
    def num_abandoned_calls(self) -> int:
        """Calls of tools, rewards or `keep` that missed their deadline and ignored their cancellation."""
        return self._user_calls.num_abandoned

    def _make_loop(self) -> RolloutLoop:
        options, fleet = self._options, self._fleet
        instances: list[Instance] = list(fleet.instances)
        forced: list[ForcedLengths] = []
        if options.lengths is not None:
            forced = [ForcedLengths(one, self._length_of) for one in fleet.instances]
            instances = list(forced)
        longest = max(prompt.sampling.max_tokens for prompt in self._prompts.values())
        transfer = fleet.pool.transfer if fleet.pool is not None else None
        settings = scheduler_settings(options.chunk_tokens, fleet.limits, longest, transfer)
        scheduler = make_scheduler(self._spec, settings, self._context, lambda request: self._length_of(request.id))
        loop = RolloutLoop(
            instances,
            scheduler,
            self._context,
            weights_version=fleet.weights_version,
            events=self._on_event,
            stall_deadline_s=options.stall_deadline_s,
            gather_s=GATHER_S,
            on_turn=self._conversations.on_turn if self._conversations is not None else None,
        )
        if self._conversations is not None:
            self._conversations.attach(loop)
        for one in forced:
            one.attach(loop.on_output)
        fleet.attach(
            ForcedFleet(loop, forced, self._length_of) if forced else loop,
            events=self._on_event,
            on_output=(lambda output: forced[output.instance].on_output(output)) if forced else loop.on_output,
            on_failure=self._fail,
        )
        return loop

    async def _pump(self, loop: RolloutLoop) -> None:
        try:
            self._admit(loop, self.groups_asked)
            with collected_seldom():
                async for result in loop.serve():
                    self._deliver(result)
                await asyncio.gather(*self._deliveries)
        finally:
            self._queue.put_nowait(None)

    def _enter(self, *, nothing_waits: bool) -> list[Group]:
        """Make groups of the prompts that enter now."""
        options, entered = self._options, []
        for position, prompt in self._supply.take(nothing_waits=nothing_waits):
            group = group_of(position, prompt, options.seed)
            if self._conversations is not None and options.calls is not None:
                limit = options.max_context_tokens or longest_context(self._fleet.limits)
                group = with_turns(group, limit)
                self._conversations.begin(group.id, options.calls, prompt.prompt)
            self._prompts[position] = prompt
            entered.append(group)
        self.groups_asked += entered
        return entered

    def _admit(self, loop: RolloutLoop, groups: Sequence[Group]) -> None:
        journal = self._options.journal
        if groups and not self._is_cancelled:
            loop.admit(groups, journal.restored() if journal else None)
        if self._supply.is_over:
            loop.seal()

    def _enter_more(self) -> None:
        """Let prompts enter that are needed now, or nothing before which waits any more."""
        loop = self.loop
        if loop is None or self._is_cancelled or self._failure is not None:
            return
        try:
            self._admit(loop, self._enter(nothing_waits=not loop.buffer.num_waiting))
        except Exception as error:  # a prompt that is drawn late may be bad
            self._fail(error)

    def _deliver(self, result: GroupResult) -> None:
        self._fleet.end_group(result.group)
        if self._rewards is None and self._keep is None:
            self._hand_out(result)
            return
        task = asyncio.create_task(self._deliver_late(result))
        self._deliveries.add(task)
        task.add_done_callback(self._deliveries.discard)

    async def _deliver_late(self, result: GroupResult) -> None:
        """Wait for the rewards, then ask whether the group is kept."""
        if self._rewards is not None:
            await self._rewards.settle(result.responses)
        try:
            is_kept = self._is_cancelled or self._keep is None or await self._keep.wants(result)
        except Exception as error:
            self._fail(error)
            return
        if is_kept:
            self._hand_out(result)
        else:
            self._drop(result)

    def _hand_out(self, result: GroupResult) -> None:
        self.num_groups_done += 1
        self._queue.put_nowait(result)
        self._supply.settle(is_kept=True)
        self._enter_more()

    def _drop(self, result: GroupResult) -> None:
        work_s = sum(one.finished_s - one.started_s for one in result.responses if one.started_s is not None)
        num_tokens = sum(one.num_tokens for one in result.responses)
        now_s = asyncio.get_running_loop().time()
        self._on_event(Dropped(now_s, result.group, len(result.responses), num_tokens, work_s))
        self._supply.settle(is_kept=False)
        self._enter_more()

    async def _finish(self, loop: RolloutLoop, pump: asyncio.Task[None]) -> None:
        """Leave the fleet ready for another run, however this one ended."""
        try:
            if not pump.done() and self._failure is None:
                self.cancel()
                with contextlib.suppress(TimeoutError):
                    async with asyncio.timeout(self._options.cancel_deadline_s):
                        await asyncio.shield(pump)
        finally:
            pump.cancel()
            for task in self._deliveries:
                task.cancel()
            await asyncio.gather(pump, *self._deliveries, return_exceptions=True)
            if self._rewards is not None:
                await self._rewards.close()
            if self._conversations is not None:
                await self._conversations.close()
            await self._user_calls.close()
            for event in pool_events(asyncio.get_running_loop().time(), self._pool_before, self._pool_stats()):
                self._on_event(event)
            self._fleet.detach()
            loop.let_go()

    def _pool_stats(self) -> PoolStats | None:
        return self._fleet.pool.stats() if self._fleet.pool is not None else None

    def _fail(self, error: Exception) -> None:
        self._failure = self._failure or error
        if self._pump_task is not None:
            self._pump_task.cancel()

    def _on_event(self, event: Event) -> None:
        if self._failure is not None:
            return
        try:
            self._take_event(event)
        except Exception as error:  # the disk is full, for example: the run ends, and its consumer gets the error
            self._fail(error)

    def _take_event(self, event: Event) -> None:
        self._summarizer(event)
        self._options.events(event)
        if isinstance(event, Stepped) and self._fleet.pool is not None:
            self._fleet.pool.saw_steps(event)
        if self.loop is None:
            return
        journal = self._options.journal
        if isinstance(event, Stopped | Extended | Answered) and journal is not None:
            journal.record(self.loop.buffer[event.request])
        elif isinstance(event, Ended):
            request = self.loop.buffer[event.request]
            if journal is not None and request.group.has_turns:
                journal.record(request)  # its end is not that of a chunk
            self._on_end(request)
        elif isinstance(event, Started) and self._supply.holds_back and not self.loop.buffer.num_waiting:
            asyncio.get_running_loop().call_soon(self._enter_more)

    def _on_end(self, request: Request) -> None:
        response = request.response
        assert response is not None, f"{request} has not ended"
        complete(response, self._codec, began_s=self._began_s)
        self._any_complete |= response.is_complete
        if self._options.verifier is not None:
            self._options.verifier.consider(response)
        if self._fleet.pool is not None:
            self._fleet.pool.free(request.id)
        if self._conversations is not None:
            self._conversations.ended(request)
        if self._rewards is not None and response.is_complete and response.reward is None:
            task = self._rewards.begin(self._prompts[response.group].prompt, response)
            task.add_done_callback(lambda _: self._report(response))
        else:
            asyncio.get_running_loop().call_soon(self._report, response)

    def _report(self, response: Response) -> None:
        if self._options.on_response is None or self._failure is not None:
            return
        try:
            self._options.on_response(response)
        except Exception as error:
            self._fail(error)

    def _length_of(self, request: int) -> int:
        assert self.loop is not None, "lengths are asked for while running"
        assert self._options.lengths is not None, "lengths were not given"
        asked = self.loop.buffer[request]
        return self._options.lengths[asked.group.id][asked.index]


def scheduler_settings(
    chunk_tokens: int | None, limits: Sequence[InstanceLimits], longest: int, transfer: TransferEstimate | None
) -> SchedulerSettings:
    """Scheduler settings in proportion to this run; the schedulers' own defaults are for a cluster.

    A chunk is an eighth of the longest response, as in the paper's workloads, in whole blocks; instances
    count as balanced within an eighth of the requests that the smallest of them runs at once. `transfer` is None
    where there is no pool.
    """
    block_size = limits[0].block_size  # one for all
    if chunk_tokens is None:
        blocks = max(1, round(max(MIN_CHUNK_TOKENS, min(MAX_CHUNK_TOKENS, longest // 8)) / block_size))
        chunk_tokens = blocks * block_size
    smallest = min(one.max_num_seqs for one in limits)
    placement = PlacementConfig(imbalance_threshold=max(1, smallest // 8), transfer=transfer)
    return SchedulerSettings(chunk_tokens=chunk_tokens, placement=placement, whole_blocks=True)


def group_of(id: int, prompt: EncodedPrompt, seed: int) -> Group:
    """The group of a run's prompt; `seed` is the run's."""
    return Group(
        id=id,
        num_requests=prompt.n,
        num_prompt_tokens=len(prompt.token_ids),
        sampling=prompt.sampling,
        prompt=prompt.token_ids,
        seed=prompt.prompt.seed if prompt.prompt.seed is not None else request_seed(seed, id),
        key=prompt.prompt.id,
    )


def with_turns(group: Group, max_context_tokens: int) -> Group:
    """A group whose responses talk to an environment."""
    return replace(group, has_turns=True, max_context_tokens=max_context_tokens)


def longest_context(limits: Sequence[InstanceLimits]) -> int:
    """Tokens of the longest request that some instance serves."""
    return max(min(one.kv_tokens, one.max_model_len) for one in limits)


def refuse_impossible(options: RunOptions, prompts: Sequence[EncodedPrompt]) -> None:
    """Raise a ConfigError for a run that cannot work."""
    spec = parse_scheduler(options.scheduler)
    if not prompts:
        raise ConfigError("there are no prompts to roll out")
    if options.speculation not in ("auto", "off"):
        raise ConfigError(f"speculation={options.speculation!r}", hint="auto or off")
    if spec.oversample > 1:
        raise ConfigError(
            f"scheduler {spec.name!r} discards responses and is off-policy; real rollouts do not offer it",
            hint="seer simulate shows what it would do",
        )
    if spec.needs_true_lengths and options.lengths is None:
        raise ConfigError(f"scheduler {spec.name!r} needs to know every length", hint="give forced lengths")
    if options.enough_groups is not None and options.lengths is not None:
        raise ConfigError("forced lengths and enough_groups cannot be combined", hint="leave one of them out")
    if options.calls is not None and options.lengths is not None:
        raise ConfigError("forced lengths and an environment cannot be combined", hint="leave one of them out")
    if options.lengths is not None:
        if len(options.lengths) != len(prompts):
            raise ConfigError(f"lengths for {len(options.lengths)} groups, {len(prompts)} prompts")
        for position, (row, prompt) in enumerate(zip(options.lengths, prompts, strict=True)):
            if len(row) != prompt.n or not all(1 <= length <= prompt.sampling.max_tokens for length in row):
                raise ConfigError(
                    f"lengths of prompt {position} are {list(row)}: "
                    f"{prompt.n} wanted, each from 1 to max_tokens={prompt.sampling.max_tokens}"
                )
