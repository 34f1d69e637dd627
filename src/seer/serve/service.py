# SPDX-License-Identifier: Apache-2.0
"""What the endpoints of a server share: the model, the settings, the gate, and how a generation becomes an answer."""

from __future__ import annotations

from collections.abc import AsyncGenerator, Callable, Collection, Sequence
from dataclasses import dataclass, field
from typing import TypeVar

from starlette.requests import Request
from starlette.responses import Response

from seer.machine.memory import total_memory_bytes
from seer.serve.backend import Backend
from seer.serve.bodies import MAX_UNREAD_BODIES, Bodies, decode
from seer.serve.choice import Ask
from seer.serve.encoder import Encoder
from seer.serve.gate import Gate
from seer.serve.generation import Generation
from seer.serve.groups import GroupNames
from seer.serve.lifecycle import Lifecycle
from seer.serve.named_params import NamedParams
from seer.serve.refusals import Refusal, bad_request, json_response
from seer.serve.sampling_fields import SamplingFields
from seer.serve.settings import ServeSettings
from seer.serve.streams import EventStream, while_connected
from seer.serve.weight_group import WeightGroup
from seer.serve.weight_updates import WeightUpdates

T = TypeVar("T")


@dataclass(slots=True)
class Service:
    """What the endpoints of a server share."""

    backend: Backend
    settings: ServeSettings
    gate: Gate
    groups: GroupNames
    generations: set[Generation] = field(default_factory=set)
    """Those that run, or wait to."""
    num_refused: int = 0
    """Requests answered with 429 so far."""
    bodies: Bodies = field(init=False)
    encoder: Encoder = field(init=False)
    lifecycle: Lifecycle = field(init=False)
    weights: WeightUpdates = field(init=False)
    group: WeightGroup = field(init=False)
    """With a trainer that broadcasts weights."""
    named_params: NamedParams = field(init=False)

    def __post_init__(self) -> None:
        """Make what needs the others."""
        self.bodies = Bodies(self.settings.limits.max_body_bytes, self.settings.limits.body_idle_s)
        self.encoder = Encoder(self.backend, MAX_UNREAD_BODIES * self.settings.limits.max_body_bytes)
        self.lifecycle = Lifecycle(self.backend, self.gate, self.cancel_running)
        self.weights = WeightUpdates(self.backend, self.gate, self.lifecycle, self.settings)
        self.group = WeightGroup(
            backend=self.settings.weight_backend,
            max_bytes=total_memory_bytes(),
            has_admin_key=self.settings.keys.admin is not None,
        )
        self.named_params = NamedParams(self.group, self.weights)

    def cancel_running(self) -> int:
        """Cancel every response that runs, and none that waits for `resume`; returns how many there were."""
        return sum(generation.cancel() for generation in list(self.generations) if generation.has_started)

    def cancel_all(self) -> int:
        """Cancel every response in flight; returns how many there were."""
        return sum(generation.cancel() for generation in list(self.generations))

    def cancel_named(self, names: Collection[str]) -> int:
        """Cancel the responses of requests that their clients gave these names; returns how many had not ended."""
        return sum(generation.cancel() for generation in list(self.generations) if generation.name in names)

    def ask(
        self,
        ids: Sequence[int],
        wanted: SamplingFields,
        *,
        group: str | None,
        session: str | None,
        keep_stop: bool,
        with_logprobs: bool,
    ) -> Ask:
        """A prompt with the sampling that its request wants, in the named group, the session's or the prompt's own."""
        return Ask(
            token_ids=ids,
            n=wanted.num_responses,
            sampling=wanted.sampling(len(ids), self.backend.max_model_len, with_logprobs=with_logprobs),
            seed=wanted.group_seed,
            group=self.groups.name(ids, group=group, session=session),
            keep_stop=keep_stop,
            skip_special=wanted.skip_special_tokens is not False,
        )

    def generation(
        self, asks: Sequence[Ask], *, streams: bool | None, needs_text: bool, name: str | None = None
    ) -> Generation:
        """The responses to these prompts, not yet started; `name` is that of its client's request."""
        made = Generation(
            self.backend, self.gate, asks, streams=bool(streams), needs_text=needs_text, running=self.generations
        )
        made.name = name
        return made

    async def read(self, request: Request, kind: type[T]) -> T:
        """The body of a request as a structure."""
        return decode(await self.bodies.read(request), kind)

    async def whole(self, request: Request, generation: Generation, reply: Callable[[Generation], object]) -> Response:
        """Generate and answer with what `reply` makes of it; a client that leaves cancels its responses."""

        async def work() -> Response:
            async with generation:
                await generation.finished()
                return json_response(reply(generation))

        return await while_connected(request, work())

    async def stream(self, request: Request, generation: Generation, events: AsyncGenerator[bytes, None]) -> Response:
        """Generate and answer with events as they come. Starts here, where a refusal still has a status."""
        await while_connected(request, generation.start())
        slow_reader_s = self.settings.limits.slow_reader_s
        return EventStream(events, on_close=generation.cancel, slow_reader_s=slow_reader_s)

    def refuse_too_many_prompts(self, num_prompts: int, *, param: str) -> None:
        """Refuse a request with more prompts than one may have."""
        most = self.settings.limits.max_prompts
        if num_prompts > most:
            raise bad_request(f"{num_prompts:,} prompts", hint=f"send at most {most:,} in one request", param=param)

    def refuse_other_model(self, model: str | None) -> None:
        """Refuse a request for a model that is not served."""
        if model is not None and model != self.backend.name:
            raise Refusal(
                404, f"the model {model!r} is not served", hint=f"the model is {self.backend.name!r}", param="model"
            )
