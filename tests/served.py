# SPDX-License-Identifier: Apache-2.0
"""A server in this process for tests: fake instances, a tokenizer of letters, and a client that calls the app.

Response i of a group with seed s has the tokens `fake_token(request_seed(s, i), position)`.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from functools import partial
from typing import Any

import httpx

from seer.buffer import request_seed
from seer.engine.base import Instance, Weights
from seer.engine.fake import END_TOKEN, KV_BLOCKS, FakeInstance, fake_length, fake_token
from seer.engine.text_codec import ChatCodec
from seer.errors import SeerError
from seer.hosting.fleet_pool import FleetPool
from seer.hosting.loop_slot import InstanceListener
from seer.metrics.events import EventSink
from seer.metrics.fleet_sample import FleetSample, InstanceSample
from seer.metrics.live_counts import LiveCounts
from seer.runs.prompts import EncodedPrompt, as_prompts, encode, refuse
from seer.runs.session import Session
from seer.runs.session_options import SessionOptions
from seer.serve.app import make_app, make_service
from seer.serve.backend import Backend
from seer.serve.live import LivePage
from seer.serve.service import Service
from seer.serve.settings import ServeSettings
from seer.types import ChunkOutput, DraftMode, InstanceLimits, Sampling

MAX_MODEL_LEN = 512
BLOCK_SIZE = 16
NAME = "a-model"


class Letters:
    """A tokenizer: token n is the n-th letter, modulo 26; texts of other tokens than that come back changed."""

    max_token_chars = 1

    def encode(self, text: str, *, add_special: bool = False) -> list[int]:
        around = [30] if add_special else []
        return around + [1 + "abcdefghijklmnopqrstuvwxyz".find(letter) for letter in text.lower() if letter.isalpha()]

    def chat(
        self,
        messages: Sequence[Mapping[str, Any]],
        *,
        tools: Sequence[Mapping[str, Any]] | None = None,
        variables: Mapping[str, Any] | None = None,
    ) -> list[int]:
        return self.encode(self.chat_text(messages, tools, variables))

    def chat_text(
        self,
        messages: Sequence[Mapping[str, Any]],
        tools: Sequence[Mapping[str, Any]] | None = None,
        variables: Mapping[str, Any] | None = None,
    ) -> str:
        effort = str((variables or {}).get("reasoning_effort", ""))
        return "".join(message["content"] for message in messages) + "t" * len(tools or ()) + effort

    def decode(self, tokens: Sequence[int], *, skip_special: bool = True) -> str:
        shown = [token for token in tokens if token != END_TOKEN or not skip_special]
        return "".join(chr(ord("a") + (token - 1) % 26) if token != END_TOKEN else "." for token in shown)


LETTERS = Letters()


class Scripted(Letters):
    """Decodes the tokens of one response to a given text, some characters for each token."""

    def __init__(self, ids: Sequence[int], text: str, num_chars: int = 3) -> None:
        pieces = [text[at : at + num_chars] for at in range(0, len(text), num_chars)]
        self.num_tokens = len(pieces)
        assert len(set(ids[: self.num_tokens])) == self.num_tokens, "a token stands for two pieces of the text"
        self._pieces = dict(zip(ids, pieces, strict=False))

    def decode(self, tokens: Sequence[int], *, skip_special: bool = True) -> str:
        return "".join(self._pieces.get(token, "?") for token in tokens)


class LocalFleet:
    """Fake instances in this process."""

    pool: FleetPool | None = None

    def __init__(self, instances: Sequence[FakeInstance]) -> None:
        self.fakes = instances
        self.weights_version = 0
        self.updates: list[Weights] = []
        self._sink: Callable[[ChunkOutput], None] | None = None

    @property
    def instances(self) -> Sequence[Instance]:
        return self.fakes

    @property
    def limits(self) -> Sequence[InstanceLimits]:
        return [fake.limits for fake in self.fakes]

    async def start(self) -> None:
        for fake in self.fakes:
            await fake.start(lambda output: self._sink(output) if self._sink is not None else None)

    async def begin_run(self, run: str, drafts: DraftMode, past: Mapping[int, Sequence[Sequence[int]]]) -> None:
        pass

    async def update_weights(self, weights: Weights) -> int:
        self.weights_version += 1
        self.updates.append(weights)
        for fake in self.fakes:
            await fake.update_weights(weights, self.weights_version)
        return self.weights_version

    def end_group(self, group: int) -> None:
        pass

    def sample(self) -> FleetSample:
        views = [fake.view() for fake in self.fakes]
        instances = [InstanceSample(True, view.num_running, view.num_waiting, 0.5) for view in views]
        return FleetSample(instances=instances, weights_version=self.weights_version)

    def attach(
        self,
        loop: InstanceListener,
        *,
        events: EventSink,
        on_output: Callable[[ChunkOutput], None],
        on_failure: Callable[[SeerError], None],
    ) -> None:
        self._sink = on_output

    def detach(self) -> None:
        self._sink = None


class Served:
    """A server without a socket: `post` and `get` call its app."""

    def __init__(self, service: Service, fleet: LocalFleet, client: httpx.AsyncClient) -> None:
        self.service = service
        self.fleet = fleet
        self.client = client

    async def post(self, path: str, body: Any = None, **settings: Any) -> httpx.Response:
        return await self.client.post(path, json=body, **settings)

    async def get(self, path: str, **settings: Any) -> httpx.Response:
        return await self.client.get(path, **settings)

    async def ok(self, path: str, body: Any = None, **settings: Any) -> Any:
        response = await self.post(path, body, **settings)
        assert response.status_code == 200, response.text
        return response.json()


@contextlib.asynccontextmanager
async def a_server(
    settings: ServeSettings | None = None,
    *,
    instances: int = 2,
    step_s: float = 0.0,
    codec: ChatCodec | None = LETTERS,
    kv_blocks: int = KV_BLOCKS,
    vocab_size: int | None = None,
) -> AsyncIterator[Served]:
    decode = partial(codec.decode, skip_special=False) if codec is not None else None
    fleet = LocalFleet(
        [
            FakeInstance(
                i,
                max_model_len=MAX_MODEL_LEN,
                step_s=step_s,
                kv_blocks=kv_blocks,
                block_size=BLOCK_SIZE,
                decode=decode,
            )
            for i in range(instances)
        ]
    )
    await fleet.start()

    def encoded(
        prompts: Any, *, n: int = 1, sampling: Sampling | None = None, tools: Any = None
    ) -> list[EncodedPrompt]:
        default = sampling or Sampling(max_tokens=16)
        good, bad = encode(
            as_prompts(prompts), codec, n=n, sampling=default, max_model_len=MAX_MODEL_LEN, vocab_size=vocab_size
        )
        refuse(bad)
        return good

    live = LivePage(LiveCounts(), fleet.sample, "a server")
    async with Session(fleet, encoded, codec, SessionOptions(chunk_tokens=16, events=live.on_event)) as session:
        backend = Backend(
            name=NAME,
            session=session,
            instances=fleet.instances,
            codec=codec,
            live=live,
            sample=fleet.sample,
        )
        service = make_service(backend, settings or ServeSettings())
        transport = httpx.ASGITransport(make_app(service))
        async with httpx.AsyncClient(transport=transport, base_url="http://localhost", timeout=60) as client:
            yield Served(service, fleet, client)


def expected_ids(seed: int, index: int, max_tokens: int, *, ignore_eos: bool = False) -> list[int]:
    """The tokens of a response."""
    own = request_seed(seed, index)
    if ignore_eos:
        return [fake_token(own, position) for position in range(max_tokens)]
    return [*(fake_token(own, position) for position in range(fake_length(own, max_tokens) - 1)), END_TOKEN]


def events_of(text: str) -> list[Any]:
    """The values of server-sent events; the last line must say that there is no more."""
    lines = [line for line in text.split("\n\n") if line]
    assert all(line.startswith("data: ") for line in lines)
    assert lines.pop() == "data: [DONE]"
    return [json.loads(line.removeprefix("data: ")) for line in lines]


async def until(condition: Callable[[], bool]) -> None:
    """Let everything else run until this is so; the test's own deadline bounds it."""
    while not condition():  # noqa: ASYNC110 - what is waited for has no event
        await asyncio.sleep(0)
