# SPDX-License-Identifier: Apache-2.0
"""What a connection can cost before any key is looked at, on a real socket: heads, time, and their number."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass
from typing import Any

import pytest

pytest.importorskip("fastapi")

from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import Response, StreamingResponse
from starlette.routing import Route

from seer.metrics.fleet_sample import FleetSample
from seer.metrics.live_counts import LiveCounts
from seer.serve.app import make_app
from seer.serve.keys import Keys
from seer.serve.live import LivePage
from seer.serve.settings import Limits, ServeSettings
from seer.serve.uvicorn_server import QuietServer, bind
from seer.serve.watch import watched
from served import a_server, until

Connection = tuple[asyncio.StreamReader, asyncio.StreamWriter]
GET = b"GET / HTTP/1.1\r\nHost: 127.0.0.1\r\n"
POST = b"POST / HTTP/1.1\r\nHost: 127.0.0.1\r\n"
MOST = 4096
FOR_EVER_S = 1000.0
SMALL = Limits(max_head_bytes=MOST, head_s=FOR_EVER_S)
BIG_ANSWER = b"x" * (64 << 20)


@dataclass
class Listening:
    server: QuietServer
    address: tuple[str, int]

    async def connect(self) -> Connection:
        return await asyncio.open_connection(*self.address)

    async def answer(self, sent: bytes) -> bytes:
        """What comes back until the server closes the connection."""
        reader, writer = await self.connect()
        writer.write(sent)
        try:
            return await everything(reader)
        finally:
            writer.close()


async def everything(reader: asyncio.StreamReader) -> bytes:
    """Until the connection ends; the server may close it before it has read all that was sent."""
    parts = []
    with contextlib.suppress(ConnectionResetError):
        while part := await reader.read(1 << 16):
            parts.append(part)
    return b"".join(parts)


@contextlib.asynccontextmanager
async def listening(app: Any, limits: Limits) -> AsyncIterator[Listening]:
    listener = bind(ServeSettings(port=0))
    server = QuietServer(app, limits)
    serving = asyncio.create_task(server.serve(sockets=[listener]))
    try:
        await server.listens.wait()
        yield Listening(server, listener.getsockname())
    finally:
        server.should_exit = server.force_exit = True
        await asyncio.gather(serving, return_exceptions=True)
        listener.close()


async def _small(request: Request) -> Response:
    return Response("small")


async def _big(request: Request) -> Response:
    return Response(BIG_ANSWER)


async def _endless(request: Request) -> Response:
    async def parts() -> AsyncIterator[bytes]:
        yield b"begun"
        await asyncio.Event().wait()

    return StreamingResponse(parts())


APP = Starlette(
    routes=[
        Route("/", _small, methods=["GET", "POST"]),
        Route("/big", _big),
        Route("/endless", _endless),
    ]
)

TOO_LONG = {
    "one header": GET + b"X: " + b"a" * 2 * MOST,
    "many headers": GET + b"a: b\r\n" * MOST,
    "short headers": GET + b"a: b\r\n" * (MOST // 30) + b"\r\n",
    "a name of a header": GET + b"a" * 2 * MOST,
    "an address": b"GET /" + b"a" * 2 * MOST,
    "a whole head": GET + b"X: " + b"a" * MOST + b"\r\n\r\n",
    "lines before a request": b"\r\n" * MOST,
}


@pytest.mark.parametrize("sent", TOO_LONG.values(), ids=TOO_LONG)
def test_a_head_without_end_is_refused(sent: bytes) -> None:
    async def scenario() -> None:
        async with listening(APP, SMALL) as one:
            answer = await one.answer(sent)
            assert b"HTTP/1.1 431 " in answer
            assert b"more than 4,096 bytes" in answer
            assert b"small" in await one.answer(GET + b"X: " + b"a" * (MOST // 2) + b"\r\nConnection: close\r\n\r\n")
            assert not one.server.server_state.connections

    asyncio.run(scenario())


TRAILERS = {
    "trailers": POST + b"Transfer-Encoding: chunked\r\n\r\n1\r\nx\r\n0\r\n" + b"a: b\r\n" * MOST,
    "one trailer": POST + b"Transfer-Encoding: chunked\r\n\r\n1\r\nx\r\n0\r\nX: " + b"a" * 2 * MOST,
}


@pytest.mark.parametrize("sent", TRAILERS.values(), ids=TRAILERS)
def test_trailers_without_end_end_their_connection(sent: bytes) -> None:
    async def scenario() -> None:
        async with listening(APP, SMALL) as one:
            assert b"HTTP/1.1 200 " not in await one.answer(sent)
            assert not one.server.server_state.connections

    asyncio.run(scenario())


def test_bodies_have_limits_of_their_own() -> None:
    """Pieces of a body, however small or many, are no head."""

    async def scenario() -> None:
        async with listening(APP, SMALL) as one:
            head = POST + b"Connection: close\r\n"
            whole = head + b"Content-Length: %d\r\n\r\n" % (64 * MOST) + b"x" * (64 * MOST)
            pieces = head + b"Transfer-Encoding: chunked\r\n\r\n" + b"1\r\nx\r\n" * MOST + b"0\r\n\r\n"
            for sent in (whole, pieces):
                assert (await one.answer(sent)).startswith(b"HTTP/1.1 200 ")

    asyncio.run(scenario())


def test_a_server_with_a_key_and_the_page_of_a_rollout_are_bounded() -> None:
    sent = GET + b"a: b\r\n" * (Limits().max_head_bytes // 6)

    async def scenario() -> None:
        settings = ServeSettings(keys=Keys(api="a-key-of-some-24-letters"), limits=SMALL)
        async with a_server(settings) as served, listening(make_app(served.service), SMALL) as one:
            assert b"HTTP/1.1 431 " in await one.answer(sent)
        live = LivePage(LiveCounts(), lambda: FleetSample(instances=[]), "a rollout")
        async with watched(live, lambda: FleetSample(instances=[]), 0) as url:
            host, port = url.removeprefix("http://").split(":")
            assert b"HTTP/1.1 431 " in await Listening(QuietServer(APP, SMALL), (host, int(port))).answer(sent)

    asyncio.run(scenario())


NO_HEAD: dict[str, tuple[bytes, bytes]] = {
    "nothing": (b"", b""),
    "half a head": (GET, b"HTTP/1.1 408 "),
    "an address that goes on": (b"GET /a", b"HTTP/1.1 408 "),
}


@pytest.mark.parametrize(("sent", "answer"), NO_HEAD.values(), ids=NO_HEAD)
def test_a_connection_without_a_request_is_closed(sent: bytes, answer: bytes) -> None:
    async def scenario() -> None:
        async with listening(APP, Limits(head_s=0.05)) as one:
            got = await one.answer(sent)
            assert got.startswith(answer) if answer else got == b""

    asyncio.run(scenario())


@pytest.mark.parametrize("then", [b"\r\n", b"GET /a", b"x"], ids=["a line", "half a head", "more of a body"])
def test_bytes_after_an_answer_do_not_keep_a_connection_open(then: bytes) -> None:
    """uvicorn's wait for the next request ends with any byte."""
    first = POST + b"Content-Length: 1000\r\n\r\n" if then == b"x" else GET + b"\r\n"

    async def scenario() -> None:
        async with listening(APP, Limits(head_s=0.05)) as one:
            reader, writer = await one.connect()
            writer.write(first)
            await reader.readuntil(b"small")
            writer.write(then)
            await everything(reader)
            writer.close()
            await until(lambda: not one.server.server_state.connections)

    asyncio.run(scenario())


def test_more_connections_than_the_limit_are_answered_and_closed() -> None:
    async def scenario() -> None:
        async with listening(APP, Limits(max_connections=2, head_s=FOR_EVER_S)) as one:
            held = [await one.connect() for _ in range(2)]
            await until(lambda: len(one.server.server_state.connections) == 2)
            for sent in (b"", GET + b"\r\n"):
                refused = await one.answer(sent)
                assert refused.startswith(b"HTTP/1.1 503 ")
                assert b"retry-after: 1\r\n" in refused
                assert b"2 connections are open. Hint: try again, or raise --max-connections" in refused
            held[0][1].close()
            await until(lambda: len(one.server.server_state.connections) == 1)
            assert b"small" in await one.answer(GET + b"Connection: close\r\n\r\n")
            held[1][1].close()

    asyncio.run(scenario())


@pytest.mark.parametrize("path", [b"/big", b"/big HTTP/1.1\r\n\r\nGET /big"], ids=["one", "pipelined"])
def test_an_answer_that_is_not_read_does_not_keep_a_connection_open(path: bytes) -> None:
    async def scenario() -> None:
        async with listening(APP, Limits(slow_reader_s=0.05)) as one:
            _, writer = await one.connect()
            writer.write(b"GET " + path + b" HTTP/1.1\r\nHost: 127.0.0.1\r\n\r\n")
            await until(lambda: one.server.server_state.total_requests > 0)
            await until(lambda: not one.server.server_state.connections)
            writer.close()

    asyncio.run(scenario())


def test_an_answer_that_is_read_slowly_is_read_whole() -> None:
    """What counts is whether the client takes anything, not how long it takes."""

    class Transport:
        def __init__(self) -> None:
            self.num_left = 1000
            self.is_aborted = False

        def get_write_buffer_size(self) -> int:
            return self.num_left

        def abort(self) -> None:
            self.is_aborted = True

    async def scenario() -> None:
        due: list[Callable[[], object]] = []

        class Loop:
            def call_later(self, delay: float, call: Callable[..., object], *arguments: object) -> asyncio.Handle:
                due.append(lambda: call(*arguments))
                return asyncio.get_running_loop().call_soon(lambda: None)

        async with listening(APP, SMALL) as one:
            _, writer = await one.connect()
            await until(lambda: bool(one.server.server_state.connections))
            protocol: Any = next(iter(one.server.server_state.connections))
            transport, loop = protocol.transport, protocol.loop
            protocol.transport, protocol.loop = Transport(), Loop()
            protocol.pause_writing()
            for _ in range(3):
                protocol.transport.num_left -= 1
                due.pop()()
                assert not protocol.transport.is_aborted
            due.pop()()
            assert protocol.transport.is_aborted
            protocol.transport, protocol.loop = transport, loop
            writer.close()

    asyncio.run(scenario())


def test_a_refusal_is_not_mixed_into_an_answer() -> None:
    async def scenario() -> None:
        async with listening(APP, SMALL) as one:
            reader, writer = await one.connect()
            writer.write(b"GET /endless HTTP/1.1\r\nHost: 127.0.0.1\r\n\r\n")
            begun = await reader.readuntil(b"begun\r\n")
            writer.write(GET + b"X: " + b"a" * 2 * MOST)
            assert begun.startswith(b"HTTP/1.1 200 ")
            assert await everything(reader) == b""
            writer.close()

    asyncio.run(scenario())
