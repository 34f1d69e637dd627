# SPDX-License-Identifier: Apache-2.0
"""Serves one instance to a driver over a channel: passes it the driver's messages, and sends its outputs back.

`seer.hosting.child` is a process that does this alone. An instance that lives in another program's process (a Ray actor
of a trainer, around an engine that the trainer made) is served there by `serve_instance`:

    # where the driver runs
    listener = Listener(host)                      # this machine's address, as the others know it
    await listener.start()
    launcher = DialLauncher(listener, start)       # start(dial) has the other process run the line below
    instance = ProcessInstance(0, InstanceSpec(factory="", settings={}), launcher=launcher)

    # in the other process, on its event loop
    await serve_instance(dial, make)               # make(id, settings, events) returns the Instance

`make` is called once, when the driver has sent its settings; the instance it returns is started, served until the
driver closes it, falls silent or is gone, and then closed. The process itself is never ended from here.

Waits for                                    unblocked by
  the next message                             the driver, its death (end of file), or the end of its lease
  a command (`Call`)                           the instance; the driver keeps the deadline
"""

from __future__ import annotations

import asyncio
import contextlib
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec

from seer.engine.base import DraftingInstance, Instance, ModelInstance, PrefetchingInstance
from seer.errors import InstanceError
from seer.hosting.channel import Channel
from seer.hosting.lease import Lease
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
    Prefetch,
    Ready,
    Setup,
    StartFailed,
    Submit,
    UpdateWeights,
    describe_error,
)
from seer.hosting.outbox import Outbox
from seer.hosting.remote.dial import Dial, connect
from seer.metrics.events import Event, EventSink
from seer.types import Chunk, ChunkEnd, ChunkOutput

Factory = Callable[[int, dict[str, Any], EventSink], Instance]

DECODER: msgspec.msgpack.Decoder[Down] = msgspec.msgpack.Decoder(Down)


async def serve_instance(dial: Dial, make: Factory) -> None:
    """Reach a driver and serve it the instance that `make` returns, until it needs it no longer or is gone."""
    channel = await connect(dial, DECODER)
    try:
        setup = await receive_setup(channel)
        loop, server = asyncio.get_running_loop(), Server(setup, make)
        await server.serve(channel, on_silence=lambda: loop.call_soon_threadsafe(channel.abort))
    finally:
        with contextlib.suppress(OSError):
            await channel.close()


async def receive_setup(channel: Channel[Down]) -> Setup:
    """The first message of a driver."""
    setup = await channel.receive()
    if not isinstance(setup, Setup):
        raise InstanceError("the driver was gone before it said what to serve")
    return setup


async def carry_out(command: Command, instance: Instance) -> None:
    """Call the method of the instance that a command names."""
    if isinstance(command, UpdateWeights):
        await instance.update_weights(Path(command.path), command.weights_version)
    elif isinstance(command, BeginRun):
        if not isinstance(instance, DraftingInstance):
            raise InstanceError(f"instance {instance.id} is a {type(instance).__name__}, which does not draft")
        await instance.begin_run(command.run, command.drafts, command.weights_version, command.past)
    elif isinstance(command, Pause):
        await instance.pause()
    else:
        await instance.resume()


class Server:
    """One instance and its channel."""

    def __init__(self, setup: Setup, make: Factory) -> None:
        self._setup = setup
        self._factory = make
        self._outbox = Outbox(self._send_news, flush_s=setup.flush_s, flush_tokens=setup.flush_tokens)
        self._instance: Instance | None = None
        self._channel: Channel[Down] | None = None
        self._calls: set[asyncio.Task[None]] = set()
        self._view_timer: asyncio.TimerHandle | None = None
        self._is_broken = False

    async def serve(self, channel: Channel[Down], *, on_silence: Callable[[], object]) -> None:
        """Make the instance and serve it; `on_silence` is called from a thread when the driver's lease ends."""
        self._channel = channel
        try:
            self._instance = instance = await self._make()
        except Exception as error:  # the driver raises it again
            traceback.print_exc()
            channel.send(StartFailed(*describe_error(error)))
            await channel.flush()
            return
        vocab_size = instance.vocab_size if isinstance(instance, ModelInstance) else None
        channel.send(Ready(instance.limits, instance.view(), vocab_size))
        heartbeat = asyncio.create_task(self._send_heartbeats())
        heartbeat.add_done_callback(_raise_failure)
        await self._handle_all(instance, channel, on_silence)
        await instance.close()
        heartbeat.cancel()
        self._outbox.flush()
        await channel.flush()

    async def _handle_all(self, instance: Instance, channel: Channel[Down], on_silence: Callable[[], object]) -> None:
        lease = Lease(self._setup.lease_s, lambda: _call(on_silence)) if self._setup.lease_s is not None else None
        if lease is not None:
            lease.start()
        try:
            while (message := await channel.receive()) is not None and not isinstance(message, Close):
                if lease is not None:
                    lease.renew()
                self._handle(instance, message)
        finally:
            if lease is not None:
                lease.end()

    async def _make(self) -> Instance:
        instance = self._factory(self._setup.id, self._setup.settings, self._outbox.put_event)
        await instance.start(self._outbox.put)
        return instance

    def _handle(self, instance: Instance, message: Down) -> None:
        if isinstance(message, Submit):
            for chunk in message.chunks:
                self._submit(instance, chunk)
        elif isinstance(message, Extend):
            instance.extend(message.leases)
        elif isinstance(message, Park):
            instance.park(message.attempts)
        elif isinstance(message, Abort):
            instance.abort(message.request)
        elif isinstance(message, Prefetch):
            if isinstance(instance, PrefetchingInstance):
                instance.prefetch(message.chunk)
        elif isinstance(message, EndGroup):
            if isinstance(instance, DraftingInstance):
                instance.end_group(message.group)
        elif isinstance(message, Call):
            task = asyncio.create_task(self._call(instance, message))
            self._calls.add(task)
            task.add_done_callback(self._calls.discard)
            task.add_done_callback(_raise_failure)

    def _submit(self, instance: Instance, chunk: Chunk) -> None:
        try:
            instance.submit(chunk)
        except Exception as error:  # fails this chunk only; the instance goes on
            end, why = ChunkEnd.FAILED, describe_error(error)[0]
            self._outbox.put(ChunkOutput(chunk.request, chunk.attempt, instance.id, 0, end=end, error=why))
        else:
            self._send_view_soon()

    async def _call(self, instance: Instance, call: Call) -> None:
        assert self._channel is not None, "a call before the channel"
        try:
            await carry_out(call.command, instance)
        except Exception as error:  # the driver raises it again
            traceback.print_exc()
            self._channel.send(CallResult(call.number, *describe_error(error)))
        else:
            self._outbox.flush()
            self._channel.send(CallResult(call.number))
            self._send_news([], [])

    def _send_view_soon(self) -> None:
        """Send one view for all chunks that arrive within `flush_s`."""
        if self._view_timer is None:
            self._view_timer = asyncio.get_running_loop().call_later(self._setup.flush_s, self._send_view)

    def _send_view(self) -> None:
        self._view_timer = None
        self._send_news([], [])

    async def _send_heartbeats(self) -> None:
        while True:
            await asyncio.sleep(self._setup.heartbeat_s)
            self._send_news([], [])

    def _send_news(self, outputs: list[ChunkOutput], events: list[Event]) -> None:
        if self._channel is None or self._instance is None or self._is_broken:
            return
        failure = self._instance.failure if isinstance(self._instance, ModelInstance) else None
        if failure is None:
            self._channel.send(News(outputs, events, self._instance.view()))
        else:
            # The driver fails the chunks, and ends this process or the whole run.
            self._is_broken = True
            self._channel.send(Broken(*describe_error(failure)))


def _call(on_silence: Callable[[], object]) -> None:
    print("the driver is silent: it is served no longer", flush=True)
    on_silence()


def _raise_failure(task: asyncio.Task[None]) -> None:
    """Raise a task's error in a callback, where the event loop's handler sees it at once."""
    if not task.cancelled():
        task.result()
