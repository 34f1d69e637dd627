# SPDX-License-Identifier: Apache-2.0
"""The driver actor: one session over the servers of all replicas. Agent loops send their requests here.

    replica      add_server                     a server has started, or was restarted
    server       services                       pool, draft servers and the name of the weights
    manager      begin_rollout, finish_step     before each rollout, and after each training step
    agent loop   generate                       one response

Weights change between rollouts, by verl's own sync into every server. `begin_rollout` asks the servers which version
they hold; the session goes on under the newest, on the servers that have it.

Invariants
  1. `generate` returns a response that ended by itself, or raises: no call waits for a session that is broken.
  2. A session that broke is replaced while there are servers, and what it had not answered is asked for again.
  3. A response that was lost is never trained around: verl goes on with what is left of its group, so `check_rollout`,
     which the replica calls before the training, and the next rollout raise.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Iterable
from dataclasses import replace
from pathlib import Path
from typing import Any

import msgspec

from seer.buffer import request_seed
from seer.config import plain_values
from seer.errors import ConfigError, InstanceError, SeerError
from seer.integrations.verl.conversing import ChatTemplate, Conversing, failed_at_tool, talk_of
from seer.integrations.verl.engine_settings import EngineNeeds
from seer.integrations.verl.gathering import Gathering
from seer.integrations.verl.requests import Generated, GenerateRequest
from seer.integrations.verl.server_fleet import ServerFleet
from seer.integrations.verl.settings import VerlSettings
from seer.integrations.verl.shared_services import Services
from seer.integrations.verl.step_record import StepRecord
from seer.integrations.verl.training_folder import TrainingFolder
from seer.integrations.verl.versions import rollout_version
from seer.machine.addresses import LOOPBACK
from seer.metrics.events import Event
from seer.runs.manifest import recorded_limits
from seer.runs.prompts import EncodedPrompt, Prompt, PromptInput
from seer.runs.response_handle import ResponseHandle
from seer.runs.session import Session
from seer.runs.session_options import SessionOptions
from seer.spread import Spread
from seer.types import FinishReason, Sampling

log = logging.getLogger(__name__)

MAX_TRIES = 3
"""Sessions that a request is given to: what breaks more of them has a cause that another one does not mend."""


class SeerDriver:
    """Runs in a Ray actor; all its methods are coroutines on one event loop."""

    def __init__(
        self,
        settings: VerlSettings,
        *,
        num_servers: int,
        node: str,
        address: str,
        num_machines: int = 1,
        run_dir: str,
        model: str,
        seed: int = 0,
        response_tokens: int | None = None,
        chat: ChatTemplate | None = None,
    ) -> None:
        """`node` is Ray's name of the driver's machine, `address` its own; the cluster has `num_machines`.

        `seed` is verl's: requests get theirs from it, in the order in which they come. Responses have at most
        `response_tokens`. `chat` is for the settings' environment.
        """
        self._settings, self._num_servers, self._model = settings, num_servers, model
        self._run_dir = settings.run_dir or Path(run_dir)
        self._node = node
        self._fleet = ServerFleet(address)
        host = LOOPBACK if num_machines == 1 else address
        self._services = Services(settings, num_servers, node, host)
        self._session: Session | None = None
        self._spread = Spread()  # learned over all sessions
        self._is_closed = False
        self._seed, self._num_submitted, self._response_tokens = seed, 0, response_tokens
        self._conversing: Conversing | None = None
        if settings.environment is not None:
            assert chat is not None, "an environment needs a template"
            assert response_tokens is not None, "conversations have a limit"
            self._conversing = Conversing(settings, chat, response_tokens)
        self._changing = asyncio.Lock()
        self._gathering = Gathering(self._submit)
        self._homes: dict[str, int | None] = {}
        """By verl's request id, of this rollout: where its newest turn ended. Later turns go there, as verl's do."""
        self._folder: TrainingFolder | None = None
        self._record: StepRecord | None = None
        self._trained: StepRecord | None = None  # of the newest training rollout
        self._finished: StepRecord | None = None  # of the newest that the trainer has logged

    async def services(self, needs: bytes, node: str) -> bytes:
        """For a server that starts: what all of them share."""
        shared = await self._services.for_server(msgspec.msgpack.decode(needs, type=EngineNeeds), node)
        self._fleet.pool = self._services.pool
        return msgspec.msgpack.encode(plain_values(shared))

    async def add_server(self, rank: int, server: Any, node: str) -> None:
        """A server has started, on this node."""
        await self._fleet.add(rank, server, is_here=node == self._node)

    async def begin_rollout(self, step: int, is_validation: bool) -> int:
        """Prompts of this step come now; returns the version of the weights that they are answered with."""
        name = f"{step:06d}" + ("-val" if is_validation else "")
        async with self._changing:
            await self.check_rollout()
            if self._is_running(name):
                return self._fleet.weights_version  # dynamic sampling: further prompts of the same rollout
            await self._use_newest_weights()
            self._refuse_old_weights(step, is_validation)
            if self._record is None or self._record.name != name:
                self._open_record(name, is_validation)
            return self._fleet.weights_version

    async def generate(self, request: bytes) -> bytes:
        """One response."""
        asked = msgspec.msgpack.decode(request, type=GenerateRequest)
        try:
            return msgspec.msgpack.encode(await self._answer(asked))
        except Exception as error:
            await self.note_failure(str(error))
            raise

    async def note_failure(self, error: str) -> None:
        """A response of the rollout that runs does not come; also for those that an agent loop could not ask for."""
        log.error("a response was lost: %s", error)
        if self._record is not None:
            self._record.note_failure(error)

    async def check_rollout(self) -> None:
        """Raise if a response of the newest rollout was lost."""
        record = self._record
        if record is not None and record.num_failed:
            raise InstanceError(
                f"{record.num_failed} responses of rollout {record.name} were lost, so its groups are not whole; "
                f"the first: {record.first_error}",
                hint="resume from the last checkpoint once the cause is mended",
            )

    async def finish_step(self, step: int, logged: dict[str, float]) -> dict[str, float]:
        """The trainer logs a step: the numbers of its rollout and of the servers, for that log."""
        record, before = self._trained, self._finished
        numbers = {
            "servers_up": float(self._fleet.num_up),
            "servers_lost": float(self._fleet.num_lost),
        }
        if record is None or record is before:
            return numbers
        self._finished = record
        record.close()
        numbers |= record.metrics()
        numbers |= await asyncio.to_thread(record.replay, self._fleet.limits, self._settings.chunk_tokens)
        if self._folder is not None:
            since_last_s = None if before is None else record.began_s - before.began_s
            self._folder.write_step(step, numbers, since_last_s, logged)
        return numbers

    async def close(self) -> None:
        """End the session and what the servers share; a second time changes nothing."""
        if self._is_closed:
            return
        self._is_closed = True
        if self._session is not None:
            await self._session.close()
        await self._fleet.close()
        if self._record is not None:
            self._record.close()
        if self._folder is not None:
            self._folder.close()
        await self._services.close()

    async def _answer(self, asked: GenerateRequest) -> Generated:
        for _ in range(MAX_TRIES - 1):
            session = self._session
            try:
                return await self._ask(asked)
            except SeerError:
                if session is None or session.failure is None or self._is_closed:
                    raise
                await self._replace(session)
        return await self._ask(asked)

    async def _ask(self, asked: GenerateRequest) -> Generated:
        if asked.request_id in self._homes:
            [handle] = self._submit(asked, 1)
        else:
            handle = await self._gathering.join(asked)
        try:
            response = await handle
        except asyncio.CancelledError:
            handle.cancel()
            raise
        if response.finish_reason is FinishReason.FAILED and not failed_at_tool(response):
            raise InstanceError(f"a response of group {asked.group} failed: {response.error}")
        if asked.request_id:
            self._homes[asked.request_id] = handle.last_instance
        return Generated(
            token_ids=response.token_ids,
            logprobs=response.logprobs,
            is_cancelled=response.finish_reason is FinishReason.CANCELLED,
            weights_version=response.weights_version,
            num_chunks=response.num_chunks,
            num_migrations=response.num_migrations,
            talk=None if asked.opening is None else talk_of(response),
        )

    async def _replace(self, broken: Session) -> None:
        """Open another session in place of one that broke, once; raises if no server is left."""
        async with self._changing:
            if self._session is not broken:
                return
            log.warning("the rollout's session broke, and its requests begin anew: %s", broken.failure)
            await self._use_newest_weights()

    def _is_running(self, name: str) -> bool:
        has_session = self._session is not None and self._session.failure is None
        return has_session and self._record is not None and self._record.name == name

    async def _use_newest_weights(self) -> None:
        session, needs_change = self._session, await self._fleet.needs_change()
        if session is not None and session.failure is None:
            if needs_change:
                await session.change_weights(self._fleet.use_newest)
            return
        if session is not None:
            await session.close()
            await self._fleet.settle()
            if self._record is not None:
                self._record.begin_session()
        await self._fleet.use_newest()
        codec = None if self._conversing is None else self._conversing.codec
        self._session = Session(self._fleet, _as_they_are, codec, self._options())
        await self._session.__aenter__()

    def _refuse_old_weights(self, step: int, is_validation: bool) -> None:
        """Exact, where a comparison of probabilities is not: weights that are one step old are hardly seen there."""
        version, expected = self._fleet.weights_version, rollout_version(step, is_validation)
        if version != expected:
            raise InstanceError(
                f"the rollout of step {step} needs weights version {expected}, the servers hold {version}",
                hint="the last weight sync did not reach any server",
            )

    def _options(self) -> SessionOptions:
        return SessionOptions(
            scheduler=self._settings.scheduler,
            speculation=self._settings.speculation,
            chunk_tokens=self._settings.chunk_tokens,
            longest_response_tokens=self._response_tokens,
            spread=self._spread,
            events=self._on_event,
            vocab_size=None if self._conversing is None else self._conversing.codec.vocab_size,
            stall_deadline_s=self._settings.stall_deadline_s,
        )

    def _submit(self, asked: GenerateRequest, n: int) -> list[ResponseHandle]:
        if self._session is None:
            raise InstanceError("no rollout has begun")
        longest = max(one.max_model_len for one in self._fleet.limits)
        room = longest - len(asked.prompt)
        if room < 1:
            raise ConfigError(
                f"a prompt of {len(asked.prompt)} tokens leaves no room within max_model_len={longest}",
                hint="raise actor_rollout_ref.rollout.max_model_len",
            )
        self._num_submitted += 1  # over all sessions: a request that is asked for again must not repeat a sibling
        prompt, more = self._opened(asked)
        return self._session.submit(
            EncodedPrompt(prompt, asked.prompt, _capped(asked.sampling, room), n),
            n=n,
            seed=request_seed(self._seed, self._num_submitted),
            group=asked.group,
            home=self._homes.get(asked.request_id),
            **more,
        )

    def _opened(self, asked: GenerateRequest) -> tuple[Prompt, dict[str, Any]]:
        if asked.opening is None:
            return Prompt(token_ids=asked.prompt, id=asked.group), {}
        assert self._conversing is not None, "agent loops converse where there is an environment"
        return self._conversing.prompt(asked, asked.opening), self._conversing.arguments(asked, asked.opening)

    def _open_record(self, name: str, is_validation: bool) -> None:
        self._homes.clear()
        if self._record is not None:
            self._record.close()
        if self._folder is None:
            self._folder = TrainingFolder(self._run_dir, self._settings.keep_steps, self._facts())
        folder = self._folder.open_step(name)
        self._record = record = StepRecord(
            name,
            began_s=asyncio.get_running_loop().time(),
            weights_version=self._fleet.weights_version,
            num_servers=self._num_servers,
            folder=folder,
            manifest=self._folder.facts,
        )
        self._trained = self._trained if is_validation else record

    def _facts(self) -> dict[str, Any]:
        settings = self._settings
        return {
            "options": {
                "instances": self._num_servers,
                "scheduler": settings.scheduler,
                "model": self._model,
                "engine": "vllm",
                "pool": settings.pool.backend,
                "chunk_tokens": settings.chunk_tokens,
            },
            **recorded_limits(self._fleet.limits),
        }

    def _on_event(self, event: Event) -> None:
        if self._record is not None:
            self._record(event)


def _capped(sampling: Sampling, room: int) -> Sampling:
    """At most the tokens that fit behind the prompt, as verl's own server has it."""
    if sampling.max_tokens <= room:
        return sampling
    return replace(sampling, max_tokens=room, min_tokens=min(sampling.min_tokens, room))


def _as_they_are(prompts: Iterable[PromptInput | EncodedPrompt], **_: Any) -> list[EncodedPrompt]:
    """For the session: prompts come as tokens, with their sampling."""
    return [prompt for prompt in prompts if isinstance(prompt, EncodedPrompt)]
