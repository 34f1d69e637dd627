# SPDX-License-Identifier: Apache-2.0
"""The process of one instance: makes the instance and serves it to the driver (serving.py).

    python -m seer.hosting.child FD           FD is one end of a socket pair, the driver's process has the other
    python -m seer.hosting.child FD dial      the other end is a launcher's; its first message is the `Dial` of a driver

It ends on `Close`, or when the process at the other end of the pair ends for any reason: a thread watches the socket,
so even a process whose event loop hangs does not outlive it, and the kernel ends one that is stopped. With a driver on
another machine it also ends when that connection does, or the driver's lease (lease.py). And it ends, with the
traceback in its log, when a thread, a callback or a task of Seer fails: a process that only looks alive would keep its
chunks until a deadline.
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
from collections.abc import Coroutine
from pathlib import Path
from types import TracebackType
from typing import Any, NoReturn

import msgspec

import seer
from seer.engine.base import Instance
from seer.hosting.channel import Channel, receive_blocking
from seer.hosting.messages import Down, Setup
from seer.hosting.remote.dial import Dial, connect
from seer.hosting.serving import DECODER, Server, receive_setup
from seer.machine.parent_death import end_with_parent
from seer.metrics.events import EventSink

_PACKAGE = str(Path(seer.__file__).parent) + os.sep
"""Where Seer's own code is. This module's name does not say: it runs as `__main__`."""

_dial_decoder = msgspec.msgpack.Decoder(Dial)


def main() -> None:
    """Serve one instance over the socket whose descriptor is the first argument, or to the driver it names."""
    faulthandler.enable()  # a crash in native code writes its stack to the log, which the driver quotes
    exit_with_threads()
    sock = socket.socket(fileno=int(sys.argv[1]))
    exit_with_driver(sock)
    if sys.argv[2:] == ["dial"]:
        asyncio.run(_run(_serve_dialled(receive_blocking(sock, _dial_decoder))))
    else:
        setup = receive_blocking(sock, DECODER)
        assert isinstance(setup, Setup), f"the first message is a {type(setup).__name__}"
        asyncio.run(_run(_serve_here(setup, sock)))


async def _serve_here(setup: Setup, sock: socket.socket) -> None:
    sock.setblocking(False)
    await _serve(setup, await Channel.over(sock, DECODER, num_received=1))


async def _serve_dialled(dial: Dial) -> None:
    channel = await connect(dial, DECODER)
    exit_with_driver(channel.socket)
    await _serve(await receive_setup(channel), channel)


async def _serve(setup: Setup, channel: Channel[Down]) -> None:
    if setup.cores is not None:
        os.sched_setaffinity(0, setup.cores)
    await Server(setup, _importing(setup.factory)).serve(channel, on_silence=_end_group)


def _importing(factory: str) -> Any:
    """The factory `module:function`, imported when it is called: an error there is one of the start."""

    def make(id: int, settings: dict[str, Any], events: EventSink) -> Instance:
        module, _, name = factory.partition(":")
        made: Instance = getattr(importlib.import_module(module), name)(id, settings, events)
        return made

    return make


def exit_with_driver(sock: socket.socket) -> None:
    """End this process when the other end of the socket closes, even if the event loop hangs; and with the process that
    started it, in the thread of its own event loop, even while this one is stopped.
    """
    end_with_parent()

    def watch() -> None:
        try:
            poll = select.poll()
            poll.register(sock.fileno(), select.POLLRDHUP | select.POLLHUP)
            poll.poll()
        except Exception:  # without its watch, this process could outlive the driver
            traceback.print_exc()
        _end_group()

    threading.Thread(target=watch, name="watch-driver", daemon=True).start()


def _end_group() -> NoReturn:
    if os.getpgrp() == os.getpid():  # also ends what this process has started, such as vLLM's engine process
        os.killpg(0, signal.SIGKILL)
    os._exit(1)


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


async def _run(serving: Coroutine[Any, Any, None]) -> None:
    asyncio.get_running_loop().set_exception_handler(_exit_with_callbacks)
    try:
        await serving
    except Exception:
        traceback.print_exc()
        _exit("the server of this process failed")


if __name__ == "__main__":
    main()
