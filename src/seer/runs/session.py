# SPDX-License-Identifier: Apache-2.0
"""A session: a rollout without an end. Prompts may come at any time, and each response is delivered when it ends.

    async with rollout.session() as session:
        handles = session.submit(prompt, n=4, group="prompt 17")
        response = await handles[0]

Scheduling, length estimates and drafts work across everything that is submitted, as in a run. A server, the agent loops
of verl and environments with turns are built on it.

Submissions of one `group` name share drafts and length estimates, whenever they come and whatever their prompts are.
Weights change between two loops: new submissions are held, those before end, and the next loop has the next version.
A change that is cancelled while those before run has not happened: their loop takes the held ones and goes on.

Invariants
  1. A handle is done exactly once: with its response, or with the error that broke the session.
  2. A token is delivered to `on_tokens` once, in order, and before its handle is done.
  3. Nothing is kept of a response that was delivered, except its group's name, length and drafts; of idle groups the
     newest ones (seer.runs.families).

Waits for                                    unblocked by
  a handle (user)                              its end, `close`, the fleet's failure, the loop's stall deadline, its
                                               environment's deadline
  `drain`                                      the end of the last request
  the loop's end, before weights change        the end of what runs, `close`, the fleet's failure, a cancellation
  a change of weights that is made, in `close` its end
  the loop's end, after `close`                the instances' last outputs, cancel_deadline_s
  environments, after `close`                  the ends of their calls, a deadline (seer.runs.user_calls)
"""

from __future__ import annotations

import asyncio
import contextlib
import secrets
from collections.abc import Awaitable, Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from types import TracebackType
from typing import NamedTuple, Protocol, Self

from seer.buffer import Request, request_seed
from seer.context import Context
from seer.engine.base import Weights
from seer.engine.text_codec import TextCodec
from seer.environments.base import Environment, Message
from seer.errors import ConfigError, SeerError
from seer.metrics.events import Ended, Event, Stepped
from seer.ranges import Seed, check
from seer.rollout import RolloutLoop
from seer.runs.arguments import check_environment_calls, check_submission
from seer.runs.conversations import Conversations, EnvironmentCalls
from seer.runs.encoded_check import refuse_no_room
from seer.runs.families import Families, Family
from seer.runs.prompts import EncodedPrompt, PromptInput
from seer.runs.response_handle import ResponseHandle, TokenSink
from seer.runs.results import complete
from seer.runs.run import longest_context, scheduler_settings
from seer.runs.session_fleet import SessionFleet
from seer.runs.session_options import SessionOptions
from seer.runs.user_calls import UserCalls
from seer.scheduling.registry import make_scheduler, parse_scheduler
from seer.types import ChunkOutput, Group, Sampling


class EncodePrompts(Protocol):
    """Checks prompts and makes tokens of them."""

    def __call__(
        self,
        prompts: Iterable[PromptInput | EncodedPrompt],
        *,
        n: int = 1,
        sampling: Sampling | None = None,
        tools: Sequence[Message] | None = None,
    ) -> list[EncodedPrompt]:
        """One for each prompt; raises if one is bad."""


class Open(NamedTuple):
    """A request that has not ended, and its user's handle."""

    request: Request
    handle: ResponseHandle


@dataclass(frozen=True, slots=True)
class Submission:
    """A prompt and the handles of its responses."""

    prompt: EncodedPrompt
    seed: int
    group: str | None
    handles: list[ResponseHandle]
    calls: EnvironmentCalls | None = None
    max_context_tokens: int | None = None
    home: int | None = None


class Session:
    """A rollout that takes prompts while it runs. Use it as an async context manager."""

    def __init__(
        self, fleet: SessionFleet, encode: EncodePrompts, codec: TextCodec | None, options: SessionOptions
    ) -> None:
        """`encode` checks prompts and makes tokens of them, as `Rollout.encode` does."""
        self._fleet, self._encode, self._codec, self._options = fleet, encode, codec, options
        self._families = Families()
        self._user_calls = UserCalls()
        self._conversations = Conversations(codec, self._user_calls)
        self._loop: RolloutLoop | None = None  # None while weights change, and at the end
        self._ending: RolloutLoop | None = None  # before weights change, while it still runs
        self._pump: asyncio.Task[None] | None = None
        self._open: dict[int, Open] = {}  # by request
        self._ended_groups: list[Group] = []
        self._held: list[Submission] = []
        self._num_submitted = 0
        self._failure: SeerError | None = None
        self._is_closed = False
        self._is_frozen = False
        self._idle = asyncio.Event()
        self._idle.set()
        self._changing = asyncio.Lock()
        self._began_s = 0.0

    async def __aenter__(self) -> Self:
        """Begin."""
        self._began_s = asyncio.get_running_loop().time()
        await self._open_loop()
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """Cancel what has not ended."""
        await self.close()

    @property
    def num_in_flight(self) -> int:
        """Requests that an instance runs."""
        return self._loop.buffer.num_in_flight if self._loop is not None else 0

    @property
    def num_at_tool(self) -> int:
        """Requests that wait for their environment."""
        return self._loop.buffer.num_at_tool if self._loop is not None else 0

    @property
    def num_waiting(self) -> int:
        """Requests that could run and that no instance runs, held ones included."""
        waiting = self._loop.buffer.num_waiting if self._loop is not None else 0
        return waiting + sum(len(one.handles) for one in self._held)

    @property
    def weights_version(self) -> int:
        """Of the tokens that are generated now."""
        return self._fleet.weights_version

    @property
    def failure(self) -> SeerError | None:
        """What broke the session; None while it works."""
        return self._failure

    @property
    def loop(self) -> RolloutLoop | None:
        """The loop, to look at; None while weights change."""
        return self._loop

    def submit(
        self,
        prompt: PromptInput | EncodedPrompt,
        *,
        n: int = 1,
        sampling: Sampling | None = None,
        seed: int | None = None,
        group: str | None = None,
        on_tokens: TokenSink | None = None,
        environment: Environment | None = None,
        environment_deadline_s: float = 60.0,
        tools: Sequence[Message] | None = None,
        max_context_tokens: int | None = None,
        home: int | None = None,
    ) -> list[ResponseHandle]:
        """Ask for `n` responses to a prompt. Bad input raises at once, and then nothing was asked for.

        Response i has the seed that response i to a `Prompt(seed=seed)` has in a run. `environment` and what belongs to
        it are as in `Rollout.run`. `home` is the instance that has computed most of the prompt, for the response to an
        earlier turn: `ResponseHandle.last_instance` of that.
        """
        self._refuse_over()
        seed = None if seed is None else check(seed, Seed, "seed")
        check_submission(group, on_tokens, home, len(self._fleet.instances))
        check_environment_calls(environment, environment_deadline_s, tools, max_context_tokens)
        [encoded] = self._encode([prompt], n=n, sampling=sampling, tools=tools)
        self._refuse_unfit(encoded)
        calls, longest = None, self.longest_request_tokens
        if environment is not None:
            refuse_no_room(encoded, max_context_tokens)
            calls = EnvironmentCalls(
                environment=environment,
                deadline_s=environment_deadline_s,
                tools=tools,
                vocab_size=self._options.vocab_size,
            )
        submission = Submission(
            encoded,
            self._seed_of(encoded, seed),
            group,
            [ResponseHandle(group, on_tokens) for _ in range(encoded.n)],
            calls,
            None if calls is None else min(max_context_tokens or longest, longest),
            home,
        )
        if self._loop is None:
            self._held.append(submission)
        else:
            self._admit(submission, self._loop)
        self._idle.clear()
        return submission.handles

    def end_group(self, group: str) -> None:
        """Nothing more comes for this group: forget it when its last response has ended."""
        family = self._families.close(group)
        if family is not None:
            self._forget(family)

    def freeze(self, is_frozen: bool) -> None:
        """Say that the instances are paused, so that no output is missed, or that they go on."""
        self._is_frozen = is_frozen
        if self._loop is not None:
            self._loop.freeze(is_frozen)

    async def drain(self) -> None:
        """Wait until nothing waits or runs."""
        await self._idle.wait()

    async def update_weights(self, weights: Weights) -> int:
        """Go on with new weights once every response that was asked for has ended; returns the new version."""
        await self.change_weights(lambda: self._fleet.update_weights(weights))
        return self._fleet.weights_version

    async def change_weights(self, change: Callable[[], Awaitable[object]]) -> None:
        """Hold new submissions, let those before end, await `change`, which puts other weights in place, and go on."""
        async with self._changing:
            self._refuse_over()
            assert self._loop is not None, "it is open"
            self._ending, self._loop = self._loop, None
            try:
                await self._end_before_change(self._ending)
                await change()
            finally:
                loop, self._ending = self._ending, None
                if self._failure is None and not self._is_closed:
                    await (self._open_loop() if loop is None else self._go_on(loop))

    async def _end_before_change(self, loop: RolloutLoop) -> None:
        assert self._pump is not None, "the loop was opened"
        loop.seal()
        await asyncio.wait([self._pump])  # a cancellation ends this wait alone
        self._ending = None
        await self._end_loop(loop, deadline_s=None)
        self._refuse_over()

    def _refuse_over(self) -> None:
        """Raise if the session is broken or closed."""
        if self._failure is not None:
            raise self._failure
        if self._is_closed:
            raise SeerError("the session has been closed", hint="async with rollout.session() as session:")

    async def close(self) -> None:
        """Cancel what has not ended, and end."""
        if self._is_closed:
            return
        self._is_closed = True
        loop, self._loop = self._loop or self._ending, None
        try:
            if loop is not None:
                loop.cancel()
                await self._end_loop(loop, deadline_s=self._options.cancel_deadline_s)
            async with self._changing:  # a change that is made ends first: the fleet is free then
                pass
            await self._conversations.close()
            await self._user_calls.close()
        finally:  # also if the caller has given up
            self._break(SeerError("the session was closed before the response ended"))

    async def _open_loop(self) -> None:
        """A loop for the weights that the instances hold now."""
        try:
            self._loop = loop = await self._make_loop()
        except Exception as error:
            self._break(error)
            raise
        self._pump = asyncio.create_task(self._serve(loop))
        self._admit_all_held(loop)

    async def _go_on(self, loop: RolloutLoop) -> None:
        """With a loop that was to end, if it has not."""
        assert self._pump is not None, "the loop was opened"
        if self._pump.done():
            await self._end_loop(loop, deadline_s=None)
            await self._open_loop()
        else:
            loop.unseal()
            self._loop = loop
            self._admit_all_held(loop)

    def _admit_all_held(self, loop: RolloutLoop) -> None:
        held, self._held = self._held, []
        for submission in held:
            self._admit_held(submission, loop)
        self._note_idle()

    async def _make_loop(self) -> RolloutLoop:
        fleet, options = self._fleet, self._options
        spec = parse_scheduler(options.scheduler)
        await fleet.begin_run(secrets.token_hex(8), spec.drafts if options.speculation == "auto" else "none", {})
        self._families = Families()
        context = Context(options.length_hints, options.spread)
        transfer = fleet.pool.transfer if fleet.pool is not None else None
        most = max(one.max_model_len for one in fleet.limits)
        longest = min(options.longest_response_tokens or most, most)
        settings = scheduler_settings(options.chunk_tokens, fleet.limits, longest, transfer)
        loop = RolloutLoop(
            fleet.instances,
            make_scheduler(spec, settings, context, lambda request: request.max_tokens),
            context,
            weights_version=fleet.weights_version,
            events=self._on_event,
            stall_deadline_s=options.stall_deadline_s,
            on_tokens=self._on_tokens,
            on_turn=self._conversations.on_turn,
        )
        loop.freeze(self._is_frozen)
        self._conversations.attach(loop)
        fleet.attach(loop, events=self._on_event, on_output=loop.on_output, on_failure=self._break)
        return loop

    async def _serve(self, loop: RolloutLoop) -> None:
        try:
            async for _ in loop.serve():
                self._forget_ended(loop)
        except SeerError as error:
            self._break(error)
        except Exception as error:
            self._break(SeerError(f"the rollout loop ended by {type(error).__name__}: {error}"))
            raise

    async def _end_loop(self, loop: RolloutLoop, *, deadline_s: float | None) -> None:
        assert self._pump is not None, "the loop was not opened"
        loop.seal()
        try:
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(deadline_s):
                    await asyncio.wait([self._pump])
        finally:
            self._pump.cancel()
            await asyncio.gather(self._pump, return_exceptions=True)
            self._fleet.detach()

    def _break(self, error: Exception) -> None:
        """The session cannot go on: every handle says why."""
        if self._failure is None:
            self._failure = error if isinstance(error, SeerError) else SeerError(f"{type(error).__name__}: {error}")
        open_handles = [one.handle for one in self._open.values()]
        open_handles += [handle for one in self._held for handle in one.handles]
        self._open.clear()
        self._held.clear()
        for handle in open_handles:
            handle.fail(self._failure)
        self._idle.set()
        if self._pump is not None and not self._is_closed:
            self._pump.cancel()

    def _seed_of(self, prompt: EncodedPrompt, seed: int | None) -> int:
        self._num_submitted += 1
        if seed is not None:
            return seed
        if prompt.prompt.seed is not None:
            return prompt.prompt.seed
        return request_seed(self._options.seed, self._num_submitted - 1)

    def _admit(self, submission: Submission, loop: RolloutLoop) -> None:
        group = self._families.enter(
            submission.prompt,
            submission.seed,
            submission.group,
            max_context_tokens=submission.max_context_tokens,
            home=submission.home,
        )
        if submission.calls is not None:
            self._conversations.begin(group.id, submission.calls, submission.prompt.prompt)
        for handle, request in zip(submission.handles, loop.admit([group]), strict=True):
            self._open[request.id] = Open(request, handle)
            handle.admitted(request.index, partial(loop.cancel_request, request))

    def _admit_held(self, submission: Submission, loop: RolloutLoop) -> None:
        """Admit what was checked against the fleet as it was: the largest instance may have left since."""
        try:
            self._refuse_unfit(submission.prompt)
        except ConfigError as error:
            for handle in submission.handles:
                handle.fail(error)
            return
        if submission.max_context_tokens is not None:
            longest = min(submission.max_context_tokens, self.longest_request_tokens)
            submission = replace(submission, max_context_tokens=longest)
        self._admit(submission, loop)

    def _note_idle(self) -> None:
        if not self._open and not self._held:
            self._idle.set()

    def _on_tokens(self, request: Request, output: ChunkOutput) -> None:
        one = self._open.get(request.id)
        if one is not None and output.span is not None:
            one.handle.take_tokens(output.span, output.stop_token)

    def _on_event(self, event: Event) -> None:
        if self._failure is not None:
            return
        try:
            self._options.events(event)
        except Exception as error:  # the disk is full, for example
            self._break(error)
            return
        if isinstance(event, Stepped) and self._fleet.pool is not None:
            self._fleet.pool.saw_steps(event)
        elif isinstance(event, Ended):
            self._on_end(event.request)

    def _on_end(self, request_id: int) -> None:
        request, handle = self._open.pop(request_id)
        assert request.response is not None, f"{request} has not ended"
        complete(request.response, self._codec, began_s=self._began_s)
        if self._fleet.pool is not None:
            self._fleet.pool.free(request_id)
        self._conversations.ended(request)
        if self._families.request_ended(request.group):
            self._ended_groups.append(request.group)
        handle.last_instance = request.last_instance
        handle.finish(request.response)
        self._note_idle()

    def _forget_ended(self, loop: RolloutLoop) -> None:
        ended, self._ended_groups = self._ended_groups, []
        for group in ended:
            loop.forget(group)
            self._conversations.forget(group.id)
            forgotten = self._families.group_ended(group)
            for prompt in forgotten.prompts:
                loop.fleet.forget(prompt)
            for family in forgotten.families:
                self._forget(family)

    def _forget(self, family: Family) -> None:
        self._fleet.end_group(family.id)
        if self._loop is not None:
            self._loop.forget_family(family.id)

    @property
    def longest_request_tokens(self) -> int:
        """Prompt and response tokens of the longest request that an instance can hold."""
        return longest_context(self._fleet.limits)

    def _refuse_unfit(self, prompt: EncodedPrompt) -> None:
        needed = len(prompt.token_ids) + prompt.sampling.max_tokens
        longest = self.longest_request_tokens
        if needed > longest:
            raise ConfigError(
                f"prompt and max_tokens make {needed} tokens, an instance holds {longest}",
                hint="lower max_tokens, or give instances more KV memory",
            )
