# SPDX-License-Identifier: Apache-2.0
"""The draft server's process: after a kill it is started again at its address, a limited number of times an hour."""

from __future__ import annotations

import asyncio
import os
import signal
from collections.abc import Callable
from pathlib import Path

import pytest

from seer.drafting.client import ClientConfig, DraftClient
from seer.drafting.ids import number_of
from seer.hosting.draft_server_process import DraftServerProcess

DEADLINE_S = 60.0


async def kill(server: DraftServerProcess, *, gone: Callable[[], bool] | None = None) -> None:
    """Kill it, and wait until its death was noticed and it serves again, or is `gone`."""
    assert server.pid is not None
    before = server.num_restarts
    os.kill(server.pid, signal.SIGKILL)
    async with asyncio.timeout(DEADLINE_S):
        await server._is_down.wait()
        if gone is None:
            await server.wait_until_up()
            assert server.num_restarts == before + 1
        else:
            while not gone():  # noqa: ASYNC110 - it is a line in a log
                await asyncio.sleep(0.01)


def test_a_killed_server_returns_to_its_address_and_keys_and_gets_its_logs_back() -> None:
    async def scenario() -> list[int]:
        server = DraftServerProcess(max_restarts=2)
        await server.start()
        address, pid = server.address, server.pid
        settings = ClientConfig(servers=(address,), keys=server.client_keys, answer_within_s=0.2)
        clients = [DraftClient(settings) for _ in range(2)]
        try:
            one, two = clients
            two.register("g", ttl_s=60.0)
            one.observe("g", "a", [1, 2, 3])
            assert await asyncio.to_thread(one.flush, DEADLINE_S)
            await kill(server)
            assert (server.address, server.pid == pid) == (address, False)
            one.observe("g", "a", [4, 5])
            assert await asyncio.to_thread(one.flush, DEADLINE_S)
            assert await asyncio.to_thread(two.flush, DEADLINE_S)
            tokens: list[int] = two.index.tokens(number_of("g"), number_of("a")).tolist()
            return tokens
        finally:
            for client in clients:
                client.close(timeout_s=0.2)
            await server.close()
            assert server.pid is None

    assert asyncio.run(scenario()) == [1, 2, 3, 4, 5]


def test_beyond_the_limit_it_stays_down(caplog: pytest.LogCaptureFixture) -> None:
    async def scenario() -> None:
        server = DraftServerProcess(max_restarts=1)
        await server.start()
        try:
            await kill(server)
            await kill(server, gone=lambda: "no draft server is left" in caplog.text)
            assert (server.pid, server.num_restarts) == (None, 1)
        finally:
            await server.close()

    asyncio.run(scenario())


def what_others_see(pid: int | None) -> bytes:
    return b"".join(Path(f"/proc/{pid}/{name}").read_bytes() for name in ("cmdline", "environ"))


def test_every_fleet_has_keys_of_its_own_and_shows_none_on_a_command_line() -> None:
    async def scenario() -> None:
        server, other = DraftServerProcess(), DraftServerProcess()
        assert server.client_keys != other.client_keys
        await server.start()
        try:
            shown = what_others_see(server.pid)
            for keys in (server._keys, server.client_keys):
                assert keys.secret_key.encode() not in shown
        finally:
            await server.close()

    asyncio.run(scenario())
