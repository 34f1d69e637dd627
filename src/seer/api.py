# SPDX-License-Identifier: Apache-2.0
"""The Python API: a fleet of instances, and rollouts over it.

    async with Rollout("smollm2", instances=2) as rollout:
        async for group in rollout.run(prompts, n=8, sampling=Sampling(max_tokens=256)):
            ...

`SyncRollout` (sync_api.py) is the same thing for code without an event loop.
"""

from __future__ import annotations

import functools
from collections.abc import AsyncIterator, Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Any, Literal, Self, Unpack

from seer.config import InstanceKeywords, RolloutConfig, RolloutKeywords, from_keywords, of_new_instances
from seer.engine.base import Weights
from seer.engine.prepare import prepare, prepare_beside
from seer.environments.base import Environment
from seer.errors import ConfigError, MissingExtra, SeerError
from seer.hosting.fleet import HostedFleet
from seer.hosting.memory_limits import refuse_what_cannot_fit
from seer.hosting.pool_choice import choose_pool
from seer.metrics.events import EventSink, both, discard
from seer.metrics.summary import Summary
from seer.ranges import Count, Port, Seed, check
from seer.runs.arguments import (
    check_choice,
    check_environment_calls,
    check_ids,
    check_journal,
    check_prompts,
    check_run,
    check_sampling,
    check_weights,
    refuse_late_prompts,
)
from seer.runs.conversations import EnvironmentCalls
from seer.runs.encoded_check import refuse_no_room, refuse_too_many
from seer.runs.identity import RunIdentity, run_identity, turns_identity
from seer.runs.journal import Journal
from seer.runs.keeping import KeepFunction
from seer.runs.prompts import EncodedPrompt, PromptInput, as_prompts, encode, refuse
from seer.runs.rewards import RewardFunction
from seer.runs.run import Lengths, PastResponses, Run, RunOptions, refuse_impossible
from seer.runs.session import Session
from seer.runs.session_options import SessionOptions
from seer.spread import Spread
from seer.types import GroupResult, Response, Sampling

if TYPE_CHECKING:
    from seer.serve.watched_rollout import WatchedRollout
    from seer.verification.verifier import Verifier
    from seer.verification.verify import Verification

IDLE_DEADLINE_S = 60.0


class Rollout:
    """A model on N instances, ready for rollouts. Use it as an async context manager."""

    def __init__(self, model: str | Path | RolloutConfig, **settings: Unpack[RolloutKeywords]) -> None:
        """Check the settings and read the model's configuration and tokenizer; nothing is started.

        `Rollout(config)` takes a whole configuration; `Rollout("model", instances=2, ...)` makes one of its keywords.
        """
        self._given = as_config(model, settings)
        self.engine = prepare(self._given)
        """The engine and the model; `engine.config` is the configuration with every default filled in."""
        refuse_what_cannot_fit(self.engine)
        self.config = config = self.engine.config
        self._fleet = HostedFleet(
            self.engine,
            config.instances,
            options=config.hosting,
            pool=choose_pool(self.engine),
            drafts=config.speculation == "auto",
        )
        self._max_model_len = self.engine.max_model_len  # of any instance that there was
        self._is_started = False
        self._watch: WatchedRollout | None = None
        self._run: Run | None = None
        self._length_hints: dict[str, int] = {}
        self._spread = Spread()  # learned over all runs and sessions
        self.verification: Verification | None = None
        """What verifying the newest run found; None if it was not asked to be, or nothing it chose ended."""

    async def __aenter__(self) -> Self:
        """Start the instances."""
        if self._is_started:
            raise SeerError("the rollout has been started already", hint="enter it once")
        await self._fleet.start()
        self._is_started = True
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """End the instances, and a run that is still going."""
        if self._run is not None:
            self._run.cancel()
        self._is_started = False
        try:
            if self._watch is not None:
                await self._watch.close()
        finally:
            await self._fleet.close()

    @property
    def weights_version(self) -> int:
        """Version of the weights; every update adds one."""
        return self._fleet.weights_version

    @property
    def fleet(self) -> HostedFleet:
        """The instances."""
        return self._fleet

    @property
    def current(self) -> Run | None:
        """The run in progress, or the last one."""
        return self._run

    @property
    def summary(self) -> Summary | None:
        """The numbers of the newest run."""
        return self._run.summary() if self._run is not None else None

    def encode(
        self,
        prompts: Iterable[PromptInput | EncodedPrompt],
        *,
        n: int = 1,
        sampling: Sampling | None = None,
        tools: Sequence[Mapping[str, Any]] | None = None,
    ) -> list[EncodedPrompt]:
        """Check prompts and turn them into tokens; one error lists all that are bad. Needs no instance.

        Prompts that are encoded already keep their place, their sampling and their number of responses. `tools` are
        schemas for the chat template of prompts that are messages.
        """
        check_prompts(prompts)
        return self._encode(prompts, n=n, sampling=sampling, tools=tools)

    def _encode(
        self,
        prompts: Iterable[PromptInput | EncodedPrompt],
        *,
        n: int,
        sampling: Sampling | None,
        tools: Sequence[Mapping[str, Any]] | None,
        first: int = 0,
        max_context_tokens: int | None = None,
    ) -> list[EncodedPrompt]:
        """`encode` for prompts of which the first is at position `first`, of conversations with such a limit."""
        check_sampling(sampling)
        good, bad = encode(
            as_prompts(prompts, first=first),
            self.engine.codec,
            n=n,
            sampling=sampling or Sampling(max_tokens=256),
            max_model_len=self._max_model_len,
            vocab_size=self.engine.vocab_size,
            tools=tools,
            first=first,
            refuse_sampling=self.engine.refuse_sampling,
        )
        refuse(bad)
        refuse_too_many(good)
        for prompt in good:
            refuse_no_room(prompt, max_context_tokens)
        return good

    def identity(
        self,
        prompts: Sequence[EncodedPrompt],
        *,
        seed: int = 0,
        lengths: Lengths | None = None,
        turns: str | None = None,
    ) -> RunIdentity:
        """What tells a run of these prompts from others, in its journal. Reads the weights, or a sample of them."""
        weights = self._fleet.weights if self.engine.model_dir is not None else None
        return run_identity(
            prompts,
            engine=self.config.engine,
            dtype=self.config.dtype,
            weights=weights or self.engine.model_dir,
            seed=seed,
            lengths=lengths,
            turns=turns,
        )

    async def run(
        self,
        prompts: Iterable[PromptInput | EncodedPrompt],
        *,
        n: int = 1,
        sampling: Sampling | None = None,
        seed: int = 0,
        reward: RewardFunction | None = None,
        reward_deadline_s: float = 60.0,
        environment: Environment | None = None,
        environment_deadline_s: float = 60.0,
        tools: Sequence[Mapping[str, Any]] | None = None,
        max_context_tokens: int | None = None,
        keep: KeepFunction | None = None,
        keep_deadline_s: float = 60.0,
        enough_groups: int | None = None,
        on_response: Callable[[Response], None] | None = None,
        scheduler: str | None = None,
        speculation: Literal["auto", "off"] | None = None,
        lengths: Lengths | None = None,
        length_hints: Mapping[str, int] | None = None,
        past_responses: PastResponses | None = None,
        events: EventSink = discard,
        journal: Path | None = None,
        resume: bool = False,
        verify: float = 0.0,
    ) -> AsyncIterator[GroupResult]:
        """Roll the prompts out, `n` responses each, and hand out groups as they complete.

        `verify` is a share of the responses to score again with a plain forward pass while the run goes on;
        after the last group `verification` says what that found.

        `environment` is called after each turn of a response and lets it go on or ends it (seer.environments). A call
        may take `environment_deadline_s`; `tools` are schemas for the chat template; prompt and response together have
        at most `max_context_tokens`, by default what an instance holds.

        `keep` is asked about every group that is whole and has its rewards; one that is not kept is dropped, and
        counted in the summary. An error in it, or a call longer than `keep_deadline_s`, ends the run. With
        `enough_groups`, as many groups run as are still to be kept, the prompts may come from an iterator, and the run
        ends when that many were kept or no prompt is left. `on_response` gets each response with its reward, and may
        call `stop_group`.

        What an earlier epoch taught may be given by prompt id: `length_hints`, the longest response, and
        `past_responses`, token ids to draft from. Neither changes a token. How far responses outgrow the first of
        their group to finish is carried from run to run by itself (seer.spread).

        Leaving the iteration early, or `cancel`, ends the rest; what was generated is handed out after
        `cancel`.
        """
        seed = check(seed, Seed, "seed")
        check_run(
            reward=reward,
            reward_deadline_s=reward_deadline_s,
            scheduler=scheduler,
            lengths=lengths,
            length_hints=length_hints,
            past_responses=past_responses,
            events=events,
            verify=verify,
        )
        check_environment_calls(environment, environment_deadline_s, tools, max_context_tokens)
        check_choice(keep, keep_deadline_s, enough_groups, on_response)
        journal = check_journal(journal, resume)
        check_prompts(prompts)
        late: Iterator[EncodedPrompt] | None = None
        to_tokens = functools.partial(
            self._encode,
            n=n,
            sampling=sampling,
            tools=tools,
            max_context_tokens=max_context_tokens,
        )
        if enough_groups is not None and not isinstance(prompts, Sequence):
            refuse_late_prompts(journal, verify)
            late = (one for position, prompt in enumerate(prompts) for one in to_tokens([prompt], first=position))
        encoded = [] if late is not None else to_tokens(prompts)
        self._require_started()
        await self._fleet.wait_until_idle(IDLE_DEADLINE_S)
        self._require_no_run()
        self.verification = None
        verifier = self._make_verifier(encoded, verify, seed, ends_ignored=lengths is not None) if verify else None
        options = RunOptions(
            scheduler=scheduler or self.config.scheduler,
            speculation=self.config.speculation if speculation is None else speculation,
            seed=seed,
            chunk_tokens=self.config.chunk_tokens,
            lengths=lengths,
            reward=reward,
            reward_deadline_s=reward_deadline_s,
            events=self._watched(events),
            length_hints=self._length_hints if length_hints is None else length_hints,
            spread=self._spread,
            past_responses=past_responses or {},
            verifier=verifier,
            calls=self._environment_calls(environment, environment_deadline_s, tools),
            max_context_tokens=max_context_tokens,
            keep=keep,
            keep_deadline_s=keep_deadline_s,
            enough_groups=enough_groups,
            on_response=on_response,
        )
        if late is None:
            refuse_impossible(options, encoded)  # first: opening a journal replaces what was there, and locks it
        book = None
        if journal is not None:
            turns = None if environment is None else turns_identity(max_context_tokens, tools)
            identity = self.identity(encoded, seed=seed, lengths=lengths, turns=turns)
            book = Journal.resume(journal, identity) if resume else Journal.create(journal, identity)
        self._run = run = Run(
            self._fleet, encoded if late is None else late, self.engine.codec, replace(options, journal=book)
        )
        groups = run.groups()
        try:
            if verifier is not None:
                await verifier.start()
            async for group in groups:
                yield group
            if verifier is not None:
                self.verification = await verifier.finish()
        finally:
            await groups.aclose()  # type: ignore[attr-defined]
            if verifier is not None:
                await verifier.close()
            if book is not None:
                book.close()

    def session(
        self,
        *,
        scheduler: str | None = None,
        speculation: Literal["auto", "off"] | None = None,
        seed: int = 0,
        length_hints: Mapping[str, int] | None = None,
        events: EventSink = discard,
    ) -> Session:
        """A rollout without an end, as an async context manager: prompts may come at any time (seer.runs.session)."""
        seed = check(seed, Seed, "seed")
        check_run(scheduler=scheduler, length_hints=length_hints, events=events)
        self._require_started()
        self._require_no_run()
        options = SessionOptions(
            scheduler=scheduler or self.config.scheduler,
            speculation=self.config.speculation if speculation is None else speculation,
            seed=seed,
            chunk_tokens=self.config.chunk_tokens,
            length_hints=self._length_hints if length_hints is None else length_hints,
            spread=self._spread,
            events=self._watched(events),
            vocab_size=self.engine.vocab_size,
        )
        return Session(self._fleet, self.encode, self.engine.codec, options)

    async def serve_metrics(self, port: int = 0) -> str:
        """Serve /metrics for Prometheus, and the live page, on this port of 127.0.0.1 until the rollout ends.

        Returns their URL; port 0 is any free one. They have the runs and sessions that start after the first call.
        Needs the extra `serve`.
        """
        check(port, Port, "port")
        self._require_started()
        if self._watch is None:
            try:
                from seer.serve.watched_rollout import WatchedRollout
            except ModuleNotFoundError as error:
                raise MissingExtra(error.name or "fastapi", "serve") from None
            self._watch = WatchedRollout(self._fleet, f"seer rollout: {self.config.model}")
        return await self._watch.serve(port)

    async def add_instances(self, num_instances: int, **own: Unpack[InstanceKeywords]) -> list[int]:
        """Start more instances, also while a run or a session goes on; returns their ids once they take work.

        They are as the first ones, but for the settings that are given here.
        """
        check(num_instances, Count, "num_instances")
        self._require_started()
        engine = self.engine
        if own:
            engine = prepare_beside(engine, of_new_instances(self._given, own))
        ids = await self._fleet.add_instances(num_instances, engine)
        self._max_model_len = max(self._max_model_len, engine.max_model_len)
        return ids

    async def remove_instances(self, ids: Sequence[int]) -> None:
        """End instances, also while a run or a session goes on: their requests are parked, and go on elsewhere."""
        check_ids(ids)
        self._require_started()
        await self._fleet.remove_instances(ids)

    def cancel(self) -> None:
        """End the run in progress; its remaining groups come out with what was generated."""
        if self._run is not None:
            self._run.cancel()

    def stop_group(self, group: int) -> None:
        """End the responses of a group of the run in progress: its result is settled. `group` is its position."""
        if self._run is not None:
            self._run.stop_group(group)

    async def update_weights(self, weights: Weights, *, keep_context: bool = False) -> int:
        """Switch every instance to new weights between two runs; returns the new weights version.

        `keep_context` carries the lengths that the last run saw to the next one as first estimates, by
        prompt id. Drafts never outlive their weights version.
        """
        check_weights(weights, keep_context, is_read=self.engine.model_dir is not None)
        self._require_started()
        self._length_hints = self._run.length_hints() if keep_context and self._run is not None else {}
        await self._fleet.wait_until_idle(IDLE_DEADLINE_S)
        if self._fleet.is_attached:  # its next chunks would be of the weights before, and fail
            raise SeerError(
                "weights change between two runs, and a run or a session is going on",
                hint="finish the run, or close its iterator; a session has an update_weights of its own",
            )
        return await self._fleet.update_weights(weights)

    def _environment_calls(
        self, environment: Environment | None, deadline_s: float, tools: Sequence[Mapping[str, Any]] | None
    ) -> EnvironmentCalls | None:
        if environment is None:
            return None
        return EnvironmentCalls(
            environment=environment, deadline_s=deadline_s, tools=tools, vocab_size=self.engine.vocab_size
        )

    def _watched(self, events: EventSink) -> EventSink:
        """A sink for these events that `serve_metrics` sees, too."""
        return events if self._watch is None else both(events, self._watch)

    def _require_started(self) -> None:
        if not self._is_started:
            raise SeerError("the rollout is not started, or has ended", hint="async with Rollout(...) as rollout:")

    def _require_no_run(self) -> None:
        if self._fleet.is_attached:
            raise SeerError("another run of this rollout is going on", hint="finish it, or close its iterator")

    def _make_verifier(
        self, prompts: Sequence[EncodedPrompt], share: float, seed: int, *, ends_ignored: bool
    ) -> Verifier:
        if self.engine.model_dir is None:
            raise ConfigError(f"responses of engine {self.config.engine!r} cannot be verified", hint="it has no model")
        from seer.verification.noise import scoring_of
        from seer.verification.verifier import Verifier

        return Verifier(
            prompts,
            share,
            folder=self.engine.model_dir,
            weights=self._fleet.weights,
            scoring=scoring_of(self.config, self.engine.model_dir),
            ends_ignored=ends_ignored,
            seed=seed,
        )


def as_config(model: str | Path | RolloutConfig, settings: RolloutKeywords) -> RolloutConfig:
    """The configuration that the arguments of `Rollout` stand for."""
    if not isinstance(model, str | Path | RolloutConfig):
        raise ConfigError(f"model is a {type(model).__name__}", hint="a folder, a name, or a RolloutConfig")
    if model == "":
        raise ConfigError("the model has no name", hint="a folder, a name, or a RolloutConfig")
    if not isinstance(model, RolloutConfig):
        return from_keywords(model, settings)
    if settings:
        raise ConfigError(
            f"Rollout(config) takes no further settings, got {', '.join(settings)}",
            hint="dataclasses.replace(config, ...) changes a configuration",
        )
    return model
