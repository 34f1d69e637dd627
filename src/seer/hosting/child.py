# SPDX-License-Identifier: Apache-2.0
"""The process of one instance: makes the instance, passes it the driver's messages, and sends its outputs back.

Started as `python -m seer.hosting.child FD` with one end of a socket pair. It ends on `Close`, or when the driver
ends for any reason: a thread watches the socket, so even a process whose event loop hangs does not outlive the driver.
It also ends, with the traceback in its log, when a thread, a callback or a task of Seer fails: a process that only
looks alive would keep its chunks until a deadline.

Waits for                                    unblocked by
  the next message                             the driver, or its death (end of file)
  a command (`Call`)                           the instance; the driver keeps the deadline
"""

from __future__ import annotations

import asyncio
import faulthandler
import importlib
import os
import select
import signal
import socket
import sys
import threading
import traceback
from collections.abc import Callable
from pathlib import Path
from types import TracebackType
from typing import Any, NoReturn

import msgspec

import seer
from seer.engine.base import DraftingInstance, Instance, ModelInstance, PrefetchingInstance
from seer.errors import InstanceError
from seer.hosting.channel import Channel, receive_blocking
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
from seer.metrics.events import Event, EventSink
from seer.types import Chunk, ChunkEnd, ChunkOutput

Factory = Callable[[int, dict[str, Any], EventSink], Instance]

_PACKAGE = str(Path(seer.__file__).parent) + os.sep
"""Where Seer's own code is. This module's name does not say: it runs as `__main__`."""

_decoder: msgspec.msgpack.Decoder[Down] = msgspec.msgpack.Decoder(Down)


def main() -> None:
    """Serve one instance over the socket whose descriptor is the only argument."""
    faulthandler.enable()  # a crash in native code writes its stack to the log, which the driver quotes
    exit_with_threads()
    sock = socket.socket(fileno=int(sys.argv[1]))
    exit_with_driver(sock)
    setup = receive_blocking(sock, _decoder)
    assert isinstance(setup, Setup), f"the first message is a {type(setup).__name__}"
    if setup.cores is not None:
        os.sched_setaffinity(0, setup.cores)
    asyncio.run(_serve_or_exit(setup, sock))


def exit_with_driver(sock: socket.socket) -> None:
    """End this process when the other end of the socket closes, even if the event loop hangs."""

    def watch() -> None:
        try:
            poll = select.poll()
            poll.register(sock.fileno(), select.POLLRDHUP | select.POLLHUP)
            poll.poll()
        except Exception:  # without its watch, this process could outlive the driver
            traceback.print_exc()
        if os.getpgrp() == os.getpid():  # also ends what this process has started, such as vLLM's engine process
            os.killpg(0, signal.SIGKILL)
        os._exit(1)

    threading.Thread(target=watch, name="watch-driver", daemon=True).start()


def exit_with_threads() -> None:
    """End this process when a thread that runs Seer's code ends with an exception."""
    usual = threading.excepthook

    def end(args: threading.ExceptHookArgs) -> None:
        usual(args)
        if _is_ours(args.exc_traceback):
            name = args.thread.name if args.thread is not None else "a thread"
            _exit(f"{name} ended with {args.exc_type.__name__}: this process ends")

    threading.excepthook = end


def _exit_with_callbacks(loop: asyncio.AbstractEventLoop, context: dict[str, Any]) -> None:
    """For the event loop: end this process when a callback of Seer raises. What it had to deliver is lost."""
    loop.default_exception_handler(context)
    error = context.get("exception")
    if "handle" in context and error is not None and _is_ours(error.__traceback__):
        traceback.print_exception(error)
        _exit("a callback failed: this process ends")


def _is_ours(trace: TracebackType | None) -> bool:
    """Whether an exception passed through Seer's code. Other libraries may let a thread of theirs fail."""
    while trace is not None:
        if trace.tb_frame.f_code.co_filename.startswith(_PACKAGE):
            return True
        trace = trace.tb_next
    return False


def _exit(why: str) -> NoReturn:
    """End now: a regular exit would wait for threads that may hang."""
    sys.stderr.write(f"{why}\n")
    sys.stderr.flush()
    os._exit(1)


async def _serve_or_exit(setup: Setup, sock: socket.socket) -> None:
    asyncio.get_running_loop().set_exception_handler(_exit_with_callbacks)
    try:
        await _Server(setup).serve(sock)
    except Exception:
        traceback.print_exc()
        _exit("the server of this process failed")


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


class _Server:
    def __init__(self, setup: Setup) -> None:
        self._setup = setup
        self._outbox = Outbox(self._send_news, flush_s=setup.flush_s, flush_tokens=setup.flush_tokens)
        self._instance: Instance | None = None
        self._channel: Channel[Down] | None = None
        self._calls: set[asyncio.Task[None]] = set()
        self._view_timer: asyncio.TimerHandle | None = None
        self._is_broken = False

    async def serve(self, sock: socket.socket) -> None:
        sock.setblocking(False)
        self._channel = channel = await Channel.over(sock, _decoder, num_received=1)
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
        while (message := await channel.receive()) is not None and not isinstance(message, Close):
            self._handle(instance, message)
        await instance.close()
        heartbeat.cancel()
        self._outbox.flush()
        await channel.flush()

    async def _make(self) -> Instance:
        module, _, name = self._setup.factory.partition(":")
        factory: Factory = getattr(importlib.import_module(module), name)
        instance = factory(self._setup.id, self._setup.settings, self._outbox.put_event)
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


def _raise_failure(task: asyncio.Task[None]) -> None:
    """Raise a task's error in a callback, where the event loop's handler sees it at once."""
    if not task.cancelled():
        task.result()


if __name__ == "__main__":
    main()
