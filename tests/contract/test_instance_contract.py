# SPDX-License-Identifier: Apache-2.0
"""The rules of every instance (seer/engine/base.py), over every implementation.

An implementation joins by adding a maker to `MAKERS`. The tests do not know which one they run, except for two facts
about it: vLLM's samples depend on where chunks begin, so its tokens are compared at temperature 0, and the simulator
counts tokens without having any.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Coroutine, Iterator
from pathlib import Path
from typing import Any

import pytest
from msgspec.structs import replace

from builders import a_cost
from dialled import Dialled
from inbox import OutputInbox, play_on
from ray_clusters import OnRay, TwoNodes, two_nodes
from seer.config import FakeEngineConfig, HostingConfig, KvConfig, LocalEngineConfig, RolloutConfig
from seer.engine.base import Instance
from seer.engine.fake import FakeInstance
from seer.engine.forced import ForcedLengths
from seer.engine.instance_settings import InstanceSettings
from seer.engine.prepare import InstanceSpec
from seer.errors import InstanceError
from seer.hosting import ProcessInstance
from seer.sim import virtual_time
from seer.sim.instance import SimulatedInstance
from seer.types import Attempt, Chunk, ChunkEnd, ChunkOutput, InstanceLimits, Lease, Sampling, TokenSpan
from vllm_engines import HEAD_DIM, LoopThread, SharedEngine, needs_vllm

FORCED_TOKENS = 10_000
"""Longer than any chunk here, so that a length given to an instance ends none of them."""
MOST_ATTEMPTS = 10
LONG = 440
"""Tokens of a chunk that a message reaches in time, mostly: the smallest engine makes 150 before its first report."""


def a_chunk(request: int = 0, *, max_tokens: int = 20, spans: tuple[TokenSpan, ...] = (), **changes: object) -> Chunk:
    sampling = changes.pop("sampling", Sampling(max_tokens=200, ignore_eos=True))
    assert isinstance(sampling, Sampling)
    generated = sum(len(span.ids) for span in spans)
    fields: dict[str, object] = {
        "request": request,
        "group": request // 4,
        "attempt": 1,
        "num_prompt_tokens": 5,
        "num_generated_tokens": generated,
        "max_tokens": max_tokens,
        "sampling": sampling,
        "seed": 100 + request,
        "weights_version": 0,
        "prompt": [5, 6, 7, 8, 9],
        "spans": spans,
    } | changes
    return Chunk(**fields)  # type: ignore[arg-type]


class Inbox(OutputInbox):
    """Reads outputs the way this suite asks for them."""

    def of(self, request: int, attempt: int = 1) -> list[ChunkOutput]:
        return [o for o in self.outputs if (o.request, o.attempt) == (request, attempt)]

    def num_tokens(self, request: int, attempt: int = 1) -> int:
        return sum(output.num_tokens for output in self.of(request, attempt))

    def tokens(self, request: int, attempt: int = 1) -> list[int]:
        return [token for output in self.of(request, attempt) if output.span for token in output.span.ids]


def fake(tmp_path: Path) -> Instance:
    return FakeInstance(0)


def forced_lengths(tmp_path: Path) -> Instance:
    return ForcedLengths(FakeInstance(0), lambda request: FORCED_TOKENS)


def simulated(tmp_path: Path) -> Instance:
    limits = InstanceLimits(kv_blocks=256, block_size=16, max_num_seqs=32, max_model_len=2048)
    return SimulatedInstance(0, a_cost(kv_tokens=limits.kv_tokens), limits, lambda request: FORCED_TOKENS)


def hosted_fake(tmp_path: Path) -> Instance:
    # Without a time per step it would end a chunk before a message reaches it.
    config = RolloutConfig(model="none", engine="fake", engine_settings=FakeEngineConfig(step_s=1e-3)).fitted()
    spec = InstanceSpec(factory="seer.engine.fake:make_fake", settings=InstanceSettings(config=config))
    return ProcessInstance(0, spec, options=HostingConfig(pin_cores=False, log_dir=tmp_path))


def dialled_fake(tmp_path: Path) -> Instance:
    return Dialled(lambda id, settings, events: FakeInstance(id, step_s=1e-3))


def on_ray(address: str, tmp_path: Path) -> Instance:
    config = RolloutConfig(model="none", engine="fake", engine_settings=FakeEngineConfig(step_s=1e-3)).fitted()
    spec = InstanceSpec(factory="seer.engine.fake:make_fake", settings=InstanceSettings(config=config))
    return OnRay(address, spec, HostingConfig(pin_cores=False, log_dir=tmp_path))


@pytest.fixture(scope="module")
def ray_cluster() -> Iterator[TwoNodes]:
    with two_nodes() as cluster:
        yield cluster


def local(tmp_path: Path) -> Instance:
    pytest.importorskip("torch")
    from seer.engine.local import LocalInstance
    from seer.engine.local.tiny import make_tiny_model

    return LocalInstance(0, make_tiny_model(tmp_path / "tiny"), kv_blocks=256, stream_tokens=4)


def hosted_local(tmp_path: Path) -> Instance:
    pytest.importorskip("torch")
    from seer.engine.local.tiny import make_tiny_model

    config = RolloutConfig(
        model=str(make_tiny_model(tmp_path / "tiny")),
        kv=KvConfig(blocks=256),
        max_num_seqs=32,
        engine_settings=LocalEngineConfig(stream_tokens=4),
    )
    spec = InstanceSpec(factory="seer.engine.local.hosted:make_local", settings=InstanceSettings(config=config))
    return ProcessInstance(0, spec, options=HostingConfig(pin_cores=False, log_dir=tmp_path))


@pytest.fixture(scope="module")
def vllm_engine(tmp_path_factory: pytest.TempPathFactory) -> Iterator[SharedEngine]:
    from seer.engine.local.tiny import make_tiny_model

    thread = LoopThread()
    folder = make_tiny_model(tmp_path_factory.mktemp("vllm") / "tiny", head_dim=HEAD_DIM)
    engine = SharedEngine(folder, thread)
    yield engine
    engine.close()
    thread.close()


MAKERS = [
    fake,
    forced_lengths,
    simulated,
    hosted_fake,
    dialled_fake,
    "ray",
    local,
    hosted_local,
    pytest.param("vllm", marks=needs_vllm),
]
Scenario = Callable[[Instance, Inbox], Awaitable[None]]


class Play:
    """Plays a scenario on a fresh instance."""

    def __init__(
        self,
        make: Callable[[], Instance],
        run: Callable[[Coroutine[Any, Any, None]], None],
        *,
        temperature: float = 1.0,
        has_tokens: bool = True,
    ) -> None:
        self._make, self._run = make, run
        self.temperature = temperature
        """At which tokens do not depend on how a request is cut into chunks."""
        self.has_tokens = has_tokens
        """Whether outputs carry tokens, not only their number."""

    def __call__(self, scenario: Scenario) -> Inbox:
        inbox = Inbox()
        self._run(play_on(self._make, inbox, scenario))
        return inbox


@pytest.fixture(params=MAKERS, ids=lambda maker: getattr(maker, "__name__", maker))
def play(request: pytest.FixtureRequest, tmp_path: Path) -> Play:
    if request.param is simulated:
        return Play(lambda: simulated(tmp_path), virtual_time.run, has_tokens=False)
    if request.param == "ray":
        cluster: TwoNodes = request.getfixturevalue("ray_cluster")
        return Play(lambda: on_ray(cluster.address, tmp_path), asyncio.run)
    if request.param != "vllm":
        return Play(lambda: request.param(tmp_path), asyncio.run)
    engine: SharedEngine = request.getfixturevalue("vllm_engine")
    (tmp_path / "tiny").symlink_to(engine.folder)  # weights that a test may update to
    return Play(engine.instance, engine.thread.run, temperature=0.0)


def test_a_chunk_yields_exactly_its_tokens_and_one_end(play: Play) -> None:
    async def scenario(instance: Instance, inbox: Inbox) -> None:
        for request in range(6):
            instance.submit(a_chunk(request, max_tokens=10 + request))
        await inbox.ends(*range(6))

    inbox = play(scenario)
    for request in range(6):
        outputs = inbox.of(request)
        assert [o.end for o in outputs if o.end] == [ChunkEnd.LIMIT]
        assert outputs[-1].end is ChunkEnd.LIMIT
        assert inbox.num_tokens(request) == 10 + request
        assert len(inbox.tokens(request)) == (10 + request if play.has_tokens else 0)


def test_every_token_has_its_log_probability_and_weights_version(play: Play) -> None:
    async def scenario(instance: Instance, inbox: Inbox) -> None:
        instance.submit(a_chunk())
        await inbox.ends(0)

    spans = [output.span for output in play(scenario).of(0) if output.span]
    assert bool(spans) is play.has_tokens
    for span in spans:
        assert len(span.ids) == len(span.logprobs)
        assert span.weights_version == 0
        assert all(value <= 0.0 for value in span.logprobs)


def test_without_log_probabilities_the_tokens_are_the_same_and_none_is_carried(play: Play) -> None:
    def sampling(*, logprobs: bool) -> Sampling:
        return Sampling(max_tokens=200, ignore_eos=True, temperature=play.temperature, logprobs=logprobs)

    async def scenario(instance: Instance, inbox: Inbox) -> None:
        for request, logprobs in enumerate((True, False)):
            instance.submit(a_chunk(request, seed=100, sampling=sampling(logprobs=logprobs)))
        await inbox.ends(0, 1)

    inbox = play(scenario)
    assert inbox.tokens(0) == inbox.tokens(1)
    assert inbox.num_tokens(0) == inbox.num_tokens(1) == 20
    carried = [[len(output.span.logprobs) for output in inbox.of(i) if output.span] for i in (0, 1)]
    assert sum(carried[0]) == (20 if play.has_tokens else 0)
    assert not any(carried[1])
    assert all(output.span.raw_logprobs is None for output in inbox.of(1) if output.span)


def test_tokens_do_not_depend_on_company_or_on_chunking(play: Play) -> None:
    sampling = Sampling(max_tokens=200, ignore_eos=True, temperature=play.temperature)

    async def scenario(instance: Instance, inbox: Inbox) -> None:
        instance.submit(a_chunk(0, max_tokens=24, sampling=sampling))
        await inbox.ends(0)
        instance.submit(a_chunk(1, seed=100, max_tokens=9, sampling=sampling))
        for other in (2, 3, 4):
            instance.submit(a_chunk(other, max_tokens=30))
        await inbox.ends(1)
        spans = tuple(o.span for o in inbox.of(1) if o.span)
        rest = a_chunk(1, seed=100, max_tokens=15, spans=spans, attempt=2, sampling=sampling)
        instance.submit(replace(rest, num_generated_tokens=inbox.num_tokens(1)))
        await inbox.until(lambda: any(o.end for o in inbox.of(1, 2)))
        await inbox.ends(2, 3, 4)

    inbox = play(scenario)
    assert inbox.num_tokens(1) + inbox.num_tokens(1, 2) == inbox.num_tokens(0) == 24
    assert inbox.tokens(1) + inbox.tokens(1, 2) == inbox.tokens(0)


def test_an_extended_lease_is_used_to_its_end_and_never_shortened(play: Play) -> None:
    async def scenario(instance: Instance, inbox: Inbox) -> None:
        await instance.pause()
        instance.submit(a_chunk(0, max_tokens=6, is_lease=True))
        instance.submit(a_chunk(1, max_tokens=9, is_lease=True))
        instance.extend([Lease(0, 1, 25), Lease(1, 1, 4), Lease(77, 1, 50)])
        instance.extend([Lease(0, 1, 15), Lease(1, 2, 40)])  # late, and for another attempt
        await instance.resume()
        await inbox.ends(0, 1)
        instance.extend([Lease(0, 1, 60)])  # it has ended
        instance.submit(a_chunk(2))
        await inbox.ends(2)

    inbox = play(scenario)
    assert (inbox.num_tokens(0), inbox.num_tokens(1)) == (25, 9)
    assert [o.end for o in inbox.outputs if o.end] == [ChunkEnd.LIMIT] * 3
    assert not inbox.of(77)


def test_a_parked_chunk_ends_early_and_goes_on_with_the_same_tokens(play: Play) -> None:
    sampling = Sampling(max_tokens=LONG, ignore_eos=True, temperature=play.temperature)
    parked = 0

    async def scenario(instance: Instance, inbox: Inbox) -> None:
        nonlocal parked
        instance.submit(a_chunk(0, max_tokens=LONG, sampling=sampling))
        await inbox.ends(0)
        # A chunk may be complete before the message reaches the instance: then another attempt is parked.
        for parked in range(1, MOST_ATTEMPTS + 1):
            await park(instance, inbox, parked)
            if ends_of(inbox, parked) == [ChunkEnd.PARKED]:
                break
        instance.extend([Lease(1, parked, LONG)])  # it has ended
        done = inbox.num_tokens(1, parked)
        spans = tuple(o.span for o in inbox.of(1, parked) if o.span)
        rest = a_chunk(1, seed=100, max_tokens=LONG - done, spans=spans, attempt=parked + 1, sampling=sampling)
        instance.submit(replace(rest, num_generated_tokens=done))
        await inbox.until(lambda: bool(ends_of(inbox, parked + 1)))

    async def park(instance: Instance, inbox: Inbox, attempt: int) -> None:
        instance.submit(a_chunk(1, seed=100, max_tokens=LONG, sampling=sampling, is_lease=True, attempt=attempt))
        await inbox.until(lambda: inbox.num_tokens(1, attempt) > 0)
        instance.park([Attempt(1, attempt + 1), Attempt(77, 1)])  # another attempt, another request
        instance.park([Attempt(1, attempt)])
        instance.park([Attempt(1, attempt)])
        await inbox.until(lambda: bool(ends_of(inbox, attempt)))

    def ends_of(inbox: Inbox, attempt: int) -> list[ChunkEnd]:
        return [o.end for o in inbox.of(1, attempt) if o.end]

    inbox = play(scenario)
    assert ends_of(inbox, parked) == [ChunkEnd.PARKED]
    assert 0 < inbox.num_tokens(1, parked) < LONG
    assert inbox.num_tokens(1, parked) + inbox.num_tokens(1, parked + 1) == inbox.num_tokens(0) == LONG
    assert inbox.tokens(1, parked) + inbox.tokens(1, parked + 1) == inbox.tokens(0)
    assert not inbox.of(77)


def test_abort_ends_a_chunk_once_and_unknown_requests_are_ignored(play: Play) -> None:
    async def scenario(instance: Instance, inbox: Inbox) -> None:
        await instance.pause()
        instance.submit(a_chunk(0, max_tokens=200))
        instance.abort(0)
        instance.abort(0)
        instance.abort(77)
        await inbox.ends(0)
        await instance.resume()
        instance.submit(a_chunk(1))
        await inbox.ends(1)

    inbox = play(scenario)
    assert [o.end for o in inbox.of(0) if o.end] == [ChunkEnd.ABORTED]
    assert not inbox.of(77)


def test_a_request_that_runs_already_is_refused_and_runs_on(play: Play) -> None:
    async def scenario(instance: Instance, inbox: Inbox) -> None:
        await instance.pause()
        instance.submit(a_chunk(0))
        try:
            instance.submit(a_chunk(0, attempt=2))
        except InstanceError:
            pass
        else:
            await inbox.until(lambda: bool(inbox.of(0, 2)))
            assert [o.end for o in inbox.of(0, 2)] == [ChunkEnd.FAILED]
        await instance.resume()
        await inbox.until(lambda: any(o.end for o in inbox.of(0)))

    inbox = play(scenario)
    assert [o.end for o in inbox.of(0) if o.end] == [ChunkEnd.LIMIT]
    assert inbox.num_tokens(0) == 20


def test_closing_aborts_the_chunks_that_still_run(play: Play) -> None:
    async def scenario(instance: Instance, inbox: Inbox) -> None:
        await instance.pause()
        instance.submit(a_chunk(0))
        instance.submit(a_chunk(1))

    inbox = play(scenario)
    assert [o.end for o in inbox.outputs if o.end] == [ChunkEnd.ABORTED] * 2


def test_weights_change_only_between_chunks_and_move_the_weights_version(play: Play, tmp_path: Path) -> None:
    async def scenario(instance: Instance, inbox: Inbox) -> None:
        await instance.pause()
        instance.submit(a_chunk(0))
        with pytest.raises(InstanceError):
            await instance.update_weights(tmp_path / "tiny", 1)
        await instance.resume()
        await inbox.ends(0)
        await instance.update_weights(tmp_path / "tiny", 1)
        chunk = a_chunk(1, weights_version=1)
        assert instance.cached_prefix_tokens(chunk) == 0
        instance.submit(chunk)
        await inbox.ends(1)

        assert instance.view().weights_version == 1

    inbox = play(scenario)
    assert {o.span.weights_version for o in inbox.of(1) if o.span} == ({1} if play.has_tokens else set())


def test_weights_and_chunks_of_another_version_are_refused(play: Play, tmp_path: Path) -> None:
    async def scenario(instance: Instance, inbox: Inbox) -> None:
        with pytest.raises(InstanceError):
            await instance.update_weights(tmp_path / "tiny", 0)
        try:
            instance.submit(a_chunk(0, weights_version=1))
        except InstanceError:
            return
        await inbox.ends(0)
        assert inbox.of(0)[-1].end is ChunkEnd.FAILED

    play(scenario)


def test_a_chunk_it_could_never_finish_is_refused_or_fails_by_name(play: Play) -> None:
    async def scenario(instance: Instance, inbox: Inbox) -> None:
        too_long = instance.limits.max_model_len
        huge = a_chunk(0, max_tokens=too_long, sampling=Sampling(max_tokens=too_long))
        try:
            instance.submit(huge)
        except InstanceError:
            return
        await inbox.ends(0)
        assert inbox.of(0)[-1].end is ChunkEnd.FAILED
        assert inbox.of(0)[-1].error

    play(scenario)


def test_its_view_counts_steps(play: Play) -> None:
    async def scenario(instance: Instance, inbox: Inbox) -> None:
        before = instance.view().num_steps
        instance.submit(a_chunk(0))
        await inbox.ends(0)
        instance.submit(a_chunk(1))
        await inbox.ends(1)
        assert instance.view().num_steps > before

    play(scenario)
