# SPDX-License-Identifier: Apache-2.0
"""An instance in its own process, seen from the driver: the protocol of `seer.engine.base` over a socket.

    new ──start──> UP ──(exit | silence | no progress)──> DOWN ──restart──> UP ...
                    └──close──> CLOSED                      └──close──> CLOSED

When the process goes down, `on_lost` is called once with the reason, and every chunk in flight then ends as FAILED, so
rule 1 of the protocol holds. `restart` starts a new process with the same weights and settings and an empty KV memory.

Tokens that are outside the vocabulary or have no probability are not passed on. For these, and when the instance says
that its model gives no probability, `on_fatal` is called instead of `on_lost`: a restart cannot help.

Waits for                                    unblocked by
  those it shares experts with                 them (rank_group.py), the child's death, start_deadline_s
  ready, after launch                          the child's `Ready` or `StartFailed`, its death, start_deadline_s
  the answer to a call                         the child, its death, call_deadline_s
  news (the reader task)                       the child, its death, the deadlines of signs_of_life.py
  its exit, after close                        the child, close_deadline_s (then it is killed)
"""

from __future__ import annotations

import asyncio
import enum
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path

import msgspec

from seer.config import HostingConfig, plain_values
from seer.config.rollout import CPU_SILENCE_S
from seer.engine.admission import refuse_impossible
from seer.engine.base import InstanceLimits, InstanceView, OutputSink, Weights
from seer.engine.instance_settings import DataParallelRank, InstanceSettings
from seer.engine.prepare import InstanceSpec
from seer.engine.staged_weights import StagedWeights, stage_in_thread
from seer.errors import DeadlineExceeded, InstanceError, NoProbability, SeerError
from seer.hosting.channel import BadFrame, Channel
from seer.hosting.devices import InstanceDevices
from seer.hosting.health import SUSPECT_HEARTBEATS, Health, InstanceStatus
from seer.hosting.launcher import Child, Launcher, LocalLauncher
from seer.hosting.messages import (
    Abort,
    BeginRun,
    Broken,
    Call,
    CallResult,
    Close,
    Command,
    Down,
    EndGroup,
    Extend,
    News,
    Park,
    Pause,
    Ping,
    Prefetch,
    Resume,
    Setup,
    Submit,
    Up,
    UpdateWeights,
    revive_error,
)
from seer.hosting.open_calls import OpenCalls
from seer.hosting.rank_group import RankEnded, RankGroup, because
from seer.hosting.readiness import await_ready, while_alive
from seer.hosting.signs_of_life import SignsOfLife
from seer.hosting.standing_commands import StandingCommands
from seer.hosting.state_events import StateSampler
from seer.metrics.events import Event, EventSink, discard
from seer.types import Attempt, Chunk, ChunkEnd, ChunkOutput, Lease

CHUNKS_PER_FRAME = 64
"""At a run's start hundreds are submitted: the instance begins with the first while the others are being placed."""

OnLost = Callable[[int, str], None]
OnFatal = Callable[[SeerError], None]

_decoder: msgspec.msgpack.Decoder[Up] = msgspec.msgpack.Decoder(Up)


class State(enum.Enum):
    """The states of a hosted instance."""

    NEW = "not started"
    UP = "up"
    DOWN = "down"
    CLOSED = "closed"


def _ignore_loss(instance: int, reason: str) -> None:
    """Chunks in flight end as FAILED in any case."""


def _ignore_fatal(error: SeerError) -> None:
    """Chunks in flight end as FAILED in any case."""


def _reason(error: BaseException) -> str:
    """Why a start ended."""
    return "its start was given up" if isinstance(error, asyncio.CancelledError) else str(error) or type(error).__name__


class ProcessInstance:
    """Implements `seer.engine.base.Instance`; the engine runs in a child process."""

    def __init__(
        self,
        id: int,
        spec: InstanceSpec,
        *,
        options: HostingConfig | None = None,
        devices: InstanceDevices | None = None,
        launcher: Launcher | None = None,
        ranks: RankGroup | None = None,
        events: EventSink = discard,
        on_lost: OnLost = _ignore_loss,
        on_fatal: OnFatal = _ignore_fatal,
    ) -> None:
        """Without a `launcher` the process is one of this machine; `ranks` are those it shares experts with."""
        self._id = id
        self._spec = spec
        self._ranks = ranks
        self._ended_with: RankEnded | None = None  # in this start
        self._launcher = launcher or LocalLauncher()
        self._options = options or HostingConfig()
        self._devices = devices or InstanceDevices()
        self._events = events
        self._on_lost = on_lost
        self._on_fatal = on_fatal
        self._state = State.NEW
        self._sink: OutputSink | None = None
        self._limits: InstanceLimits | None = None
        self._vocab_size: int | None = None
        self._view = InstanceView()
        self._sampler = StateSampler(id, events)
        self._child: Child | None = None
        self._channel: Channel[Up] | None = None
        self._tasks: list[asyncio.Task[None]] = []
        self._in_flight: dict[int, int] = {}  # request -> attempt
        self._unsent: list[Chunk] = []  # submitted since the event loop's last turn
        self._known_tokens: dict[int, int] = {}  # request -> tokens of it that this instance has computed
        self._groups: set[int] = set()  # that it ran members of and may draft for
        self._calls = OpenCalls()
        self._standing = StandingCommands()
        self._staged = StagedWeights(Path())
        self._is_paused = False
        self._is_restarting = False
        self._cleaning = asyncio.Lock()
        self._num_lost = 0
        self._signs = SignsOfLife(
            silence_deadline_s=self._options.silence_deadline_s or CPU_SILENCE_S,
            progress_deadline_s=self._options.progress_deadline_s,
        )

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
        """Launch the process and wait until it is ready."""
        assert self._state is State.NEW, f"instance {self._id} is {self._state.value}"
        self._sink = sink
        try:
            await self._launch()
        except BaseException as error:
            if self._ranks is not None:
                self._ranks.leave(self, _reason(error))
            raise

    def submit(self, chunk: Chunk) -> None:
        """Send the chunk; refused while the process is down."""
        if self._state is not State.UP or self._channel is None:
            raise InstanceError(f"instance {self._id} is {self._state.value}")
        if not self._in_flight:
            self._signs.stepped(self._now_s())  # it was idle until now, which is no lack of progress
        self._in_flight[chunk.request] = chunk.attempt
        if self._standing.newest(BeginRun) is not None:
            self._groups.add(chunk.group)
        self._known_tokens[chunk.request] = chunk.num_context_tokens
        if not self._unsent:
            asyncio.get_running_loop().call_soon(self._send_chunks)  # with those that follow at once, in one frame
        self._unsent.append(chunk.without_logprobs())
        if len(self._unsent) == CHUNKS_PER_FRAME:
            self._send_chunks()

    def extend(self, leases: Sequence[Lease]) -> None:
        """Send the leases."""
        known = [lease for lease in leases if self._in_flight.get(lease.request) == lease.attempt]
        if known:
            self._send(Extend(known))

    def park(self, attempts: Sequence[Attempt]) -> None:
        """Send the parks."""
        known = [one for one in attempts if self._in_flight.get(one.request) == one.attempt]
        if known:
            self._send(Park(known))

    def abort(self, request: int) -> None:
        """Send the abort."""
        if request in self._in_flight:
            self._send(Abort(request))

    def _send_chunks(self) -> None:
        chunks, self._unsent = self._unsent, []
        if chunks and self._channel is not None:
            self._channel.send(Submit(chunks))

    def _send(self, message: Down) -> None:
        """Send a message after the chunks before it."""
        self._send_chunks()
        if self._channel is not None:
            self._channel.send(message)

    def view(self) -> InstanceView:
        """The newest view the child has sent."""
        return self._view

    def cached_prefix_tokens(self, chunk: Chunk) -> int:
        """What this instance has computed since its KV memory was empty; it may have dropped some of it."""
        return min(self._known_tokens.get(chunk.request, 0), chunk.num_context_tokens)

    def prefetch(self, chunk: Chunk) -> None:
        """Send the hint."""
        if self._state is State.UP and self._channel is not None:
            self._channel.send(Prefetch(chunk.without_logprobs()))

    async def update_weights(self, weights: Weights, weights_version: int) -> None:
        """Switch to a newer weights version. Tensors go through a file in shared memory, kept for a restart."""
        if self._in_flight:
            raise InstanceError(
                f"instance {self._id} runs {len(self._in_flight)} chunks; weights change between rollouts"
            )
        staged = await stage_in_thread(weights)
        try:
            await self.configure(UpdateWeights(str(staged.path), weights_version, staged.home is not None))
        except BaseException:
            staged.discard()
            raise
        self._staged.discard()
        self._staged = staged

    async def pause(self) -> None:
        """Stop stepping."""
        self._is_paused = True
        await self.call(Pause())

    async def resume(self) -> None:
        """Step again."""
        await self.call(Resume())
        self._signs.stepped(self._now_s())
        self._is_paused = False

    async def close(self) -> None:
        """End the process: let it exit within the deadline, then kill it. Chunks in flight end as ABORTED."""
        was, self._state = self._state, State.CLOSED
        self._calls.fail(f"instance {self._id} was closed")
        if was is State.UP and self._channel is not None and self._child is not None:
            self._send(Close())
            await self._child.wait(self._options.close_deadline_s)
            # Let the reader task reach the end of the stream, so that the last outputs are delivered.
            if self._tasks:  # none if it was closed from elsewhere while this waited
                await asyncio.wait(self._tasks[:1], timeout=self._options.close_deadline_s)
        await self._clean_up()
        self._staged.discard()
        self._end_all(ChunkEnd.ABORTED, None)

    # Beyond the protocol

    def kill(self) -> None:
        """End the process now; what follows is as after its death."""
        if self._child is not None:
            self._child.kill()

    def end_with(self, other: int, reason: str) -> None:
        """An instance that this one shares experts with has ended, and so does this one."""
        self._ended_with = ended = RankEnded(because(other, reason))
        if self._state is State.UP:
            self._lose(str(ended))
        elif self._child is not None:  # it starts
            self._child.kill()

    @property
    def ranks(self) -> Sequence[int]:
        """The instances that start together, this one among them."""
        return (self._id,) if self._ranks is None else self._ranks.ids

    def give_up(self, reason: str) -> None:
        """It cannot do what the others did: end it, as if it had died."""
        self._lose(reason)

    @property
    def is_up(self) -> bool:
        """Whether it accepts chunks now."""
        return self._state is State.UP and not self._is_restarting

    @property
    def health(self) -> Health:
        """How it does, for people and metrics."""
        if self._state is State.CLOSED:
            return Health.RETIRED
        if self._is_restarting or self._state is State.NEW:
            return Health.STALE if self._state is State.UP else Health.RESTARTING
        if self._state is State.DOWN:
            return Health.DEAD
        return Health.SUSPECT if self._silent_s() > SUSPECT_HEARTBEATS * self._options.heartbeat_s else Health.HEALTHY

    def status(self) -> InstanceStatus:
        """Its state now."""
        view = self._view
        return InstanceStatus(
            id=self._id,
            health=self.health,
            weights_version=view.weights_version,
            node=self.node,
            num_running=view.num_running,
            num_waiting=view.num_waiting,
            num_lost=self._num_lost,
            silent_s=self._silent_s(),
        )

    def _silent_s(self) -> float:
        return self._signs.silent_s(self._now_s()) if self._state is State.UP else 0.0

    @property
    def num_in_flight(self) -> int:
        """Chunks submitted whose end has not arrived."""
        return len(self._in_flight)

    @property
    def pid(self) -> int | None:
        """Process id of the child, while there is one."""
        return self._child.pid if self._child is not None else None

    @property
    def node(self) -> str | None:
        """The address of its machine; None on the driver's own, and while there is no process."""
        return self._child.node if self._child is not None else None

    @property
    def node_name(self) -> str | None:
        """Tells machines apart; None for the driver's own, and while there is no process."""
        return self._child.node_name if self._child is not None else None

    def end_group(self, group: int) -> None:
        """Have the child forget a group's drafts, if it has any; a process that is down has forgotten them.

        Most instances of a large fleet never run a member of the group.
        """
        begun = self._standing.newest(BeginRun)
        has_past = begun is not None and group in begun.past
        if group not in self._groups and not has_past:
            return
        self._groups.discard(group)
        if self._state is State.UP and self._channel is not None:
            self._channel.send(EndGroup(group))

    async def call(self, command: Command) -> None:
        """Have the child carry out a command, and wait for it within the call deadline."""
        name = type(command).__name__
        if self._state is not State.UP or self._channel is None:
            raise InstanceError(f"instance {self._id} is {self._state.value}; {name} was not sent")
        number, answer = self._calls.open()
        try:
            async with asyncio.timeout(self._options.call_deadline_s):
                self._send(Call(number, await self._localized(command)))
                await answer
            if isinstance(command, UpdateWeights):  # its next news says so too
                self._view = replace(self._view, weights_version=command.weights_version)
        except TimeoutError:
            raise DeadlineExceeded(f"{name} of instance {self._id}", self._options.call_deadline_s) from None
        finally:
            self._calls.forget(number)

    async def _localized(self, command: Command) -> Command:
        """The command as the process's machine must see it; the answer may come as the loss of the process."""
        return command if self._child is None else await self._child.localized(command)

    async def configure(self, command: Command) -> None:
        """`call` now, and again after every restart until a newer command of its kind replaces it."""
        await self.call(command)
        self._standing.keep(command)
        if isinstance(command, UpdateWeights | BeginRun):  # a run counts its requests from 0
            self._known_tokens.clear()

    async def restart(self) -> None:
        """Start a lost instance again, with the weights and settings it had."""
        assert self._state is State.DOWN, f"instance {self._id} is {self._state.value}"
        await self._clean_up()
        self._is_restarting = True
        try:
            await self._launch()
            await self._repeat_configuration()
            self._refuse_lost()
        except SeerError as error:
            self._lose(str(error))  # one that started and did not take its configuration must not stay up
            raise
        finally:
            self._is_restarting = False

    def _refuse_lost(self) -> None:
        """Raise if it was lost after the last answer of its restart: a loss during one is not reported."""
        if self._state is not State.UP:
            raise InstanceError(f"instance {self._id} was lost when it had its configuration")

    def configure_after_restart(self, command: Command) -> None:
        """`configure` for an instance that is down or restarting: the command is sent once it is up."""
        self._standing.keep(command)

    def configured(self, kind: type[Command]) -> Command | None:
        """The newest command of a kind that it was given."""
        return self._standing.newest(kind)

    def take_back(self, kind: type[Command], earlier: Command | None) -> None:
        """A restart repeats this command again, not the one of its kind that came after it."""
        self._standing.take_back(kind, earlier)

    async def take_configuration_of(self, other: ProcessInstance) -> None:
        """Carry out the newest commands of each kind that another instance was given."""
        self._standing.take_over(other._standing)
        await self._repeat_configuration()

    async def _repeat_configuration(self) -> None:
        await self._standing.repeat(self.call, lambda: self._state is State.UP)

    # The child

    async def _launch(self) -> None:
        options, self._ended_with = self._options, None
        try:
            self._child = child = await self._launcher.launch(self._id, self._spec, self._devices, options)
            self._channel = child.channel
            self._refuse_closed()
            rank = None
            if self._ranks is not None:
                rank = await while_alive(self._id, child, options, self._ranks.meet(self, child))
            child.channel.send(self._setup(child, rank))
            ready = await await_ready(self._id, child, options)
            self._refuse_closed()
        except BaseException as error:
            if self._ranks is not None and self._ended_with is None and not isinstance(error, RankEnded):
                self._ranks.not_started(self, _reason(error))
            await self._clean_up()
            if isinstance(error, Exception):
                self._refuse_closed()  # then this is what it died of
                if self._ended_with is not None:
                    raise self._ended_with from None
            raise
        self._limits, self._view, self._vocab_size = ready.limits, ready.view, ready.vocab_size
        self._signs.begin(self._now_s())
        self._is_paused = False
        self._state = State.UP
        self._sampler.reset()
        self._tasks = [asyncio.create_task(self._read(self._channel)), asyncio.create_task(self._watch())]

    def _refuse_closed(self) -> None:
        """Raise if it was closed while it started: what `close` did not find is ended by who started it."""
        if self._state is State.CLOSED:
            raise InstanceError(f"instance {self._id} was closed while it started")

    def _setup(self, child: Child, rank: DataParallelRank | None) -> Setup:
        options, settings = self._options, child.spec.settings
        if rank is not None:
            assert isinstance(settings, InstanceSettings), "engines of Seer have ranks"
            settings = replace(settings, data_parallel=rank)
        # Longer than our own patience: what it serves until then is not wanted any more.
        lease_s = max(options.lease_deadline_s, 2 * self._signs.silence_deadline_s)
        return Setup(
            id=self._id,
            factory=child.spec.factory,
            settings=plain_values(settings),
            cores=self._devices.cores,
            flush_s=options.flush_s,
            flush_tokens=options.flush_tokens,
            heartbeat_s=options.heartbeat_s,
            lease_s=lease_s if child.node is not None else None,
        )

    async def _read(self, channel: Channel[Up]) -> None:
        try:
            await self._take_messages(channel)
        except BadFrame as error:
            self._lose(f"it sent {error}")

    async def _take_messages(self, channel: Channel[Up]) -> None:
        while (message := await channel.receive()) is not None:
            now_s = self._now_s()
            self._signs.spoke(now_s)
            if isinstance(message, News):
                self._take_news(message, now_s)
            elif isinstance(message, Broken):
                error = revive_error(f"instance {self._id}: {message.error}", message.kind, message.hint)
                self._lose(f"its engine failed: {message.error}", error if isinstance(error, NoProbability) else None)
            elif isinstance(message, CallResult):
                self._calls.settle(self._id, message)
        if channel.lost_a_frame:
            self._lose("a message of its process was lost")
        elif self._state is State.UP and (child := self._child) is not None:
            await child.wait(self._options.close_deadline_s)
            self._lose(f"its process ended: {await child.exit_cause()}")

    def _take_news(self, news: News, now_s: float) -> None:
        if news.view.num_steps != self._view.num_steps or not self._in_flight:
            self._signs.stepped(now_s)
        self._view = news.view
        for event in news.events:
            self._events(self._on_our_clock(event))
        self._sampler.sample(news.view, now_s, self._limits)
        assert self._sink is not None, "news before start"
        for output in news.outputs:
            try:
                self._refuse_impossible(output)
            except NoProbability as error:
                self._lose(str(error), error)
                return
            if output.end is not None and self._in_flight.get(output.request) == output.attempt:
                del self._in_flight[output.request]
            self._known_tokens[output.request] = self._known_tokens.get(output.request, 0) + output.num_tokens
            self._sink(output)

    def _on_our_clock(self, event: Event) -> Event:
        clock = self._child.clock if self._child is not None else None
        if clock is None or not clock.offset_s:
            return event
        return msgspec.structs.replace(event, t_s=clock.to_ours(event.t_s))

    def _refuse_impossible(self, output: ChunkOutput) -> None:
        """Raise if the output's tokens cannot be the model's."""
        request, span = output.request, output.span
        if span is not None:
            position = self._known_tokens.get(request, 0)
            refuse_impossible(
                request, position, span.ids, span.logprobs, span.raw_logprobs, vocab_size=self._vocab_size
            )

    async def _watch(self) -> None:
        """Send heartbeats, and declare a process lost that gives no sign of life."""
        heartbeat_s = self._options.heartbeat_s
        assert self._child is not None, "there is a process to watch"
        child = self._child
        child.look_after(0.0)  # waits for a core count from now on
        while True:
            before_s = self._now_s()
            await asyncio.sleep(heartbeat_s)
            now_s = self._now_s()
            if self._channel is not None:
                self._channel.send(Ping())
            # Where this loop itself was delayed, news may be unread.
            late_s = now_s - before_s - heartbeat_s
            self._signs.forgive(late_s=late_s, waited_s=child.look_after(self._signs.silent_s(now_s)))
            num_chunks = 0 if self._is_paused else len(self._in_flight)
            if (reason := self._signs.why_lost(now_s, num_chunks=num_chunks)) is not None:
                return self._lose(reason)

    def _lose(self, reason: str, fatal: SeerError | None = None) -> None:
        if self._state is not State.UP:
            return
        self._state = State.DOWN
        self._num_lost += 1
        self._unsent = []
        if self._child is not None:
            self._child.kill()
        self._known_tokens.clear()
        self._calls.fail(f"instance {self._id} was lost: {reason}")
        self._view = InstanceView(weights_version=self._view.weights_version)
        self._sampler.sample(self._view, self._now_s(), self._limits)
        if fatal is not None:
            self._on_fatal(fatal)
        elif not self._is_restarting:  # during a restart, `restart` raises instead
            self._on_lost(self._id, reason)
        self._end_all(ChunkEnd.FAILED, f"instance {self._id} was lost: {reason}")
        if self._ranks is not None:
            self._ranks.ended(self, reason)

    def _end_all(self, end: ChunkEnd, error: str | None) -> None:
        ended, self._in_flight = self._in_flight, {}
        for request, attempt in ended.items():
            if self._sink is not None:
                self._sink(ChunkOutput(request, attempt, self._id, 0, end=end, error=error))

    async def _clean_up(self) -> None:
        """End the tasks, the socket, the process and its log.

        After a cancellation it can be called again; `close` and a restart that is given up may call it at once.
        """
        async with self._cleaning:
            for task in self._tasks:
                task.cancel()
            await asyncio.gather(*self._tasks, return_exceptions=True)
            self._tasks = []
            if self._channel is not None:
                await self._channel.close()
                self._channel = None
            if self._child is not None:
                self._child.kill()
                await self._child.wait(self._options.close_deadline_s)
                await self._child.close()
                self._child = None

    @staticmethod
    def _now_s() -> float:
        return asyncio.get_running_loop().time()
