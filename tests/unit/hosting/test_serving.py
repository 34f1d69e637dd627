# SPDX-License-Identifier: Apache-2.0
"""Instances served from somewhere else: leases, lost connections, clocks, and what is sent."""

from __future__ import annotations

import asyncio
import os
import signal
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec
import pytest

from dialled import Dialled
from inbox import OutputInbox
from seer.config import HostingConfig
from seer.engine.fake import FakeInstance
from seer.errors import ConfigError, InstanceError
from seer.hosting import lease
from seer.hosting.channel import frame
from seer.hosting.launch import ChildProcess
from seer.hosting.launcher import DialledChild
from seer.hosting.lease import Lease
from seer.hosting.messages import Setup, Submit
from seer.hosting.remote.clock import ClockOffset
from seer.hosting.remote.listener import Listener
from seer.metrics.events import Decoding, Event
from seer.types import Chunk, ChunkEnd, Sampling, TokenSpan

DEADLINE_S = 60.0
OPTIONS = HostingConfig(pin_cores=False, heartbeat_s=0.1)


def a_chunk(**changes: Any) -> Chunk:
    fields: dict[str, Any] = {
        "request": 0,
        "group": 0,
        "attempt": 1,
        "num_prompt_tokens": 2,
        "num_generated_tokens": 0,
        "max_tokens": 100_000,
        "sampling": Sampling(max_tokens=100_000, ignore_eos=True),
        "seed": 7,
        "weights_version": 0,
        "prompt": [1, 2],
    }
    return Chunk(**fields | changes)


def make_fake(id: int, settings: dict[str, Any], events: Any) -> FakeInstance:
    return FakeInstance(id, step_s=1e-3, max_model_len=200_000)


def test_a_submission_carries_ids_and_no_log_probabilities() -> None:
    spans = (TokenSpan([5, 6], [-0.1, -0.2], 0, [-0.3, -0.4]), TokenSpan([7], [-0.5], 0))
    chunk = a_chunk(num_generated_tokens=3, spans=spans)
    sent = chunk.without_logprobs()
    assert (sent.token_ids(), sent.spans) == (chunk.token_ids(), ())
    assert sent.token_ids() == [1, 2, 5, 6, 7]
    long = a_chunk(num_generated_tokens=10_000, spans=(TokenSpan([30_000] * 10_000, [-1.25] * 10_000, 0),))
    sizes = [len(msgspec.msgpack.encode(Submit([one]))) for one in (long, long.without_logprobs())]
    assert sizes[1] < 0.3 * sizes[0]


def test_a_chunk_of_a_hosted_instance_arrives_without_its_log_probabilities() -> None:
    got: list[Chunk] = []

    class Keeping(FakeInstance):
        def submit(self, chunk: Chunk) -> None:
            got.append(chunk)
            super().submit(chunk)

    async def scenario() -> None:
        inbox = OutputInbox()
        instance = Dialled(lambda id, settings, events: Keeping(id), options=OPTIONS)
        await instance.start(inbox)
        spans = (TokenSpan([5], [-0.5], 0),)
        instance.submit(a_chunk(num_generated_tokens=1, spans=spans, max_tokens=3))
        await inbox.ends(0)
        await instance.close()

    asyncio.run(scenario())
    assert (got[0].spans, got[0].token_ids()) == ((), [1, 2, 5])


def test_a_lease_that_is_renewed_does_not_end_and_one_that_is_not_ends_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(lease, "GRACE_S", 0.01)
    ended = threading.Event()
    kept = Lease(0.05, lambda: pytest.fail("it was renewed"))
    kept.start()
    lost = Lease(0.05, ended.set)
    lost.start()
    while not ended.wait(0.01):
        kept.renew()
    kept.end()


def test_a_driver_that_falls_silent_is_served_no_longer(monkeypatch: pytest.MonkeyPatch) -> None:
    """The driver's pings stop, as over a cut link; both sides notice by themselves."""
    monkeypatch.setattr(lease, "GRACE_S", 0.05)
    losses: list[str] = []

    async def scenario() -> None:
        inbox = OutputInbox()
        instance = Dialled(make_fake, options=OPTIONS, on_lost=lambda id, reason: losses.append(reason))
        monkeypatch.setattr(type(instance.inner), "_setup", _with_lease(0.5))
        await instance.start(inbox)
        instance.submit(a_chunk())
        await inbox.until(lambda: bool(inbox.outputs))
        channel = instance.inner._channel
        assert channel is not None
        monkeypatch.setattr(channel, "send", lambda message: None)
        await inbox.ends(0)
        assert inbox.outputs[-1].end is ChunkEnd.FAILED
        await asyncio.gather(*instance.serving)
        await instance.close()

    asyncio.run(scenario())
    assert len(losses) == 1
    assert "the connection to 127.0.0.1 ended" in losses[0]


def _with_lease(lease_s: float) -> Callable[..., Setup]:
    from seer.hosting.process import ProcessInstance

    usual = ProcessInstance._setup
    return lambda self, *given: msgspec.structs.replace(usual(self, *given), lease_s=lease_s)


def test_an_instance_elsewhere_can_be_lost_and_dials_in_again() -> None:
    lost = asyncio.Event()

    async def scenario() -> None:
        inbox = OutputInbox()
        instance = Dialled(make_fake, options=OPTIONS, on_lost=lambda id, reason: lost.set())
        await instance.start(inbox)
        instance.submit(a_chunk())
        await inbox.until(lambda: bool(inbox.outputs))
        instance.inner.kill()
        async with asyncio.timeout(DEADLINE_S):
            await lost.wait()
        await instance.inner.restart()
        instance.submit(a_chunk(request=1, max_tokens=5))
        await inbox.ends(1)
        await instance.close()

    asyncio.run(scenario())


def test_an_instance_that_cannot_be_made_elsewhere_fails_the_start_with_its_own_error() -> None:
    def refuse(id: int, settings: dict[str, Any], events: Any) -> FakeInstance:
        raise ConfigError("there is no such model", hint="name another")

    async def scenario() -> None:
        instance = Dialled(refuse, options=OPTIONS)
        with pytest.raises(ConfigError, match="there is no such model"):
            await instance.start(OutputInbox())
        await instance.close()

    asyncio.run(scenario())


def test_events_of_another_machine_come_on_our_clock(monkeypatch: pytest.MonkeyPatch) -> None:
    events: list[Event] = []
    sinks: list[Any] = []

    def make(id: int, settings: dict[str, Any], sink: Any) -> FakeInstance:
        sinks.append(sink)
        return FakeInstance(id)

    async def scenario() -> None:
        instance = Dialled(make, options=OPTIONS)
        seen = asyncio.Event()

        def take(event: Event) -> None:
            events.append(event)
            if isinstance(event, Decoding):
                seen.set()

        instance.inner._events = take
        await instance.start(OutputInbox())
        child = instance.inner._child
        assert isinstance(child, DialledChild)
        child.clock = ClockOffset(1000.0, 0.1)
        sinks[0](Decoding(1234.5, 0, 0))
        async with asyncio.timeout(DEADLINE_S):
            await seen.wait()
        await instance.close()

    asyncio.run(scenario())
    assert [event.t_s for event in events if isinstance(event, Decoding)] == [234.5]


def a_dialling_process(tmp_path: Path) -> ChildProcess:
    return ChildProcess(
        "dialling", tmp_path, module="seer.hosting.child", single_thread=True, arguments=("dial",), imports=("inbox",)
    )


@pytest.mark.parametrize("gone", ["driver", "launcher", "lease"])
def test_a_process_that_dialled_in_ends_with_its_driver_its_launcher_or_its_lease(gone: str, tmp_path: Path) -> None:
    async def scenario() -> None:
        at = Listener("127.0.0.1", encrypted=True)
        await at.start()
        process = a_dialling_process(tmp_path)
        dial, come = at.expect()
        process.socket.sendall(frame(dial))
        async with asyncio.timeout(DEADLINE_S):
            channel = (await come).channel
            setup = Setup(
                id=0,
                factory="host_fakes:make_fake",
                settings={},
                cores=None,
                flush_s=0.05,
                flush_tokens=16,
                heartbeat_s=0.1,
                lease_s=0.3 if gone == "lease" else 60.0,
            )
            channel.send(setup)
            await channel.receive()
            if gone == "driver":
                await channel.close()
            elif gone == "launcher":
                process.socket.close()
            await asyncio.to_thread(process._process.wait)
        assert process._process.returncode in (0, -signal.SIGKILL), process.log_tail()
        await channel.close()
        process.socket.close()
        process.close()
        await at.close()

    asyncio.run(scenario())


def shown_of(pid: int) -> bytes:
    """What other processes can read of how it was started."""
    return b"".join(Path(f"/proc/{pid}/{name}").read_bytes() for name in ("cmdline", "environ"))


def test_neither_the_command_line_nor_the_environment_of_a_process_has_its_secret(tmp_path: Path) -> None:
    async def scenario() -> None:
        at = Listener("127.0.0.1")
        await at.start()
        process = a_dialling_process(tmp_path)
        dial, come = at.expect()
        process.socket.sendall(frame(dial))
        async with asyncio.timeout(DEADLINE_S):
            channel = (await come).channel
        shown = shown_of(process.pid)
        assert dial.secret not in shown
        assert dial.secret.hex().encode() not in shown
        assert dial.launch.encode() not in shown
        os.killpg(process.pid, signal.SIGKILL)
        await process.wait(DEADLINE_S)
        await channel.close()
        process.socket.close()
        process.close()
        await at.close()

    asyncio.run(scenario())


def test_a_process_that_cannot_reach_its_driver_says_so_in_its_log(tmp_path: Path) -> None:
    async def scenario() -> None:
        at = Listener("127.0.0.1")
        await at.start()
        dial, _ = at.expect()
        await at.close()
        process = a_dialling_process(tmp_path)
        process.socket.sendall(frame(dial))
        await process.wait(DEADLINE_S)
        assert "cannot be reached" in process.exit_cause()
        process.socket.close()
        process.close()

    asyncio.run(scenario())


def test_a_driver_that_says_nothing_to_serve_is_an_error() -> None:
    async def scenario() -> None:
        from seer.hosting.serving import serve_instance

        at = Listener("127.0.0.1")
        await at.start()
        dial, come = at.expect()
        serving = asyncio.create_task(serve_instance(dial, make_fake))
        await (await come).channel.close()
        with pytest.raises(InstanceError, match="before it said what to serve"):
            await serving
        await at.close()

    asyncio.run(scenario())
