"""What every instance promises (seer/engine/base.py), over the fake, the hosted fake and the local engine.

An implementation joins by adding a maker to `MAKERS`; nothing here knows which one it tests.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from pathlib import Path

import pytest

from inbox import OutputInbox
from seer.engine.base import Instance
from seer.engine.fake import FakeInstance
from seer.engine.host import HostOptions, InstanceSpec, ProcessInstance
from seer.errors import InstanceError
from seer.types import Chunk, ChunkEnd, ChunkOutput, Sampling, TokenSpan


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
        "epoch": 0,
        "prompt": [5, 6, 7, 8, 9],
        "spans": spans,
    } | changes
    return Chunk(**fields)  # type: ignore[arg-type]


class Inbox(OutputInbox):
    """Reads outputs the way this suite asks for them."""

    def of(self, request: int, attempt: int = 1) -> list[ChunkOutput]:
        return [o for o in self.outputs if (o.request, o.attempt) == (request, attempt)]

    def tokens(self, request: int, attempt: int = 1) -> list[int]:
        return [token for output in self.of(request, attempt) if output.span for token in output.span.ids]


def fake(tmp_path: Path) -> Instance:
    return FakeInstance(0)


def hosted_fake(tmp_path: Path) -> Instance:
    spec = InstanceSpec(factory="seer.engine.fake:make_fake", settings={})
    return ProcessInstance(0, spec, options=HostOptions(pin=False, log_dir=tmp_path))


def local(tmp_path: Path) -> Instance:
    pytest.importorskip("torch")
    from seer.engine.local import LocalInstance  # noqa: PLC0415
    from seer.engine.local.tiny import make_tiny_model  # noqa: PLC0415

    return LocalInstance(0, make_tiny_model(tmp_path / "tiny"), kv_blocks=256, stream_tokens=4)


def hosted_local(tmp_path: Path) -> Instance:
    pytest.importorskip("torch")
    from seer.engine.local.tiny import make_tiny_model  # noqa: PLC0415

    settings = {"model_dir": str(make_tiny_model(tmp_path / "tiny")), "kv_blocks": 256, "stream_tokens": 4}
    spec = InstanceSpec(factory="seer.engine.host.local:make_local", settings=settings)
    return ProcessInstance(0, spec, options=HostOptions(pin=False, log_dir=tmp_path))


MAKERS = [fake, hosted_fake, local, hosted_local]
Scenario = Callable[[Instance, Inbox], Awaitable[None]]


@pytest.fixture(params=MAKERS, ids=lambda maker: maker.__name__)
def play(request: pytest.FixtureRequest, tmp_path: Path) -> Callable[[Scenario], Inbox]:
    def run(scenario: Scenario) -> Inbox:
        inbox = Inbox()

        async def main() -> None:
            instance = request.param(tmp_path)
            await instance.start(inbox)
            try:
                await scenario(instance, inbox)
            finally:
                await instance.close()

        asyncio.run(main())
        return inbox

    return run


def test_a_chunk_yields_exactly_its_tokens_and_one_end(play: Callable[[Scenario], Inbox]) -> None:
    async def scenario(instance: Instance, inbox: Inbox) -> None:
        for request in range(6):
            instance.submit(a_chunk(request, max_tokens=10 + request))
        await inbox.ends(*range(6))

    inbox = play(scenario)
    for request in range(6):
        outputs = inbox.of(request)
        assert [o.end for o in outputs if o.end] == [ChunkEnd.LIMIT]
        assert outputs[-1].end is ChunkEnd.LIMIT
        assert len(inbox.tokens(request)) == 10 + request


def test_every_token_has_its_log_probability_and_epoch(play: Callable[[Scenario], Inbox]) -> None:
    async def scenario(instance: Instance, inbox: Inbox) -> None:
        instance.submit(a_chunk())
        await inbox.ends(0)

    spans = [output.span for output in play(scenario).of(0) if output.span]
    assert spans
    for span in spans:
        assert len(span.ids) == len(span.logprobs)
        assert span.epoch == 0
        assert all(value <= 0.0 for value in span.logprobs)


def test_tokens_do_not_depend_on_company_or_on_chunking(play: Callable[[Scenario], Inbox]) -> None:
    async def scenario(instance: Instance, inbox: Inbox) -> None:
        instance.submit(a_chunk(0, max_tokens=24))
        await inbox.ends(0)
        instance.submit(a_chunk(1, seed=100, max_tokens=9))
        for other in (2, 3, 4):
            instance.submit(a_chunk(other, max_tokens=30))
        await inbox.ends(1)
        spans = tuple(o.span for o in inbox.of(1) if o.span)
        instance.submit(a_chunk(1, seed=100, max_tokens=15, spans=spans, attempt=2))
        await inbox.until(lambda: any(o.end for o in inbox.of(1, 2)))
        await inbox.ends(2, 3, 4)

    inbox = play(scenario)
    assert inbox.tokens(1) + inbox.tokens(1, 2) == inbox.tokens(0)


def test_abort_ends_a_chunk_once_and_unknown_requests_are_ignored(play: Callable[[Scenario], Inbox]) -> None:
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


def test_closing_ends_what_is_in_hand(play: Callable[[Scenario], Inbox]) -> None:
    async def scenario(instance: Instance, inbox: Inbox) -> None:
        await instance.pause()
        instance.submit(a_chunk(0))
        instance.submit(a_chunk(1))

    inbox = play(scenario)
    assert [o.end for o in inbox.outputs if o.end] == [ChunkEnd.ABORTED] * 2


def test_weights_change_only_between_chunks_and_move_the_epoch(
    play: Callable[[Scenario], Inbox], tmp_path: Path
) -> None:
    async def scenario(instance: Instance, inbox: Inbox) -> None:
        await instance.pause()
        instance.submit(a_chunk(0))
        with pytest.raises(InstanceError):
            await instance.update_weights(tmp_path / "tiny", 1)
        await instance.resume()
        await inbox.ends(0)
        await instance.update_weights(tmp_path / "tiny", 1)
        chunk = a_chunk(1, epoch=1)
        assert instance.cached_prefix_tokens(chunk) == 0
        instance.submit(chunk)
        await inbox.ends(1)

    inbox = play(scenario)
    assert {o.span.epoch for o in inbox.of(1) if o.span} == {1}


def test_a_chunk_it_could_never_finish_is_refused_or_fails_by_name(play: Callable[[Scenario], Inbox]) -> None:
    async def scenario(instance: Instance, inbox: Inbox) -> None:
        too_long = instance.limits.max_context_tokens
        huge = a_chunk(0, max_tokens=too_long, sampling=Sampling(max_tokens=too_long))
        try:
            instance.submit(huge)
        except InstanceError:
            return
        await inbox.ends(0)
        assert inbox.of(0)[-1].end is ChunkEnd.FAILED
        assert inbox.of(0)[-1].error

    play(scenario)


def test_its_view_counts_steps(play: Callable[[Scenario], Inbox]) -> None:
    async def scenario(instance: Instance, inbox: Inbox) -> None:
        before = instance.view().num_steps
        instance.submit(a_chunk(0))
        await inbox.ends(0)
        instance.submit(a_chunk(1))
        await inbox.ends(1)
        assert instance.view().num_steps > before

    play(scenario)
