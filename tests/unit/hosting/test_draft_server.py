# SPDX-License-Identifier: Apache-2.0
"""The draft server's process: after a kill it is started again at its address, a limited number of times an hour."""

from __future__ import annotations

import asyncio
import os
import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from seer.drafting.client import ClientConfig, DraftClient
from seer.drafting.ids import number_of
from seer.errors import DraftError
from seer.hosting import draft_server_process
from seer.hosting.draft_server_process import DraftServerProcess
from seer.hosting.draft_servers import DraftServers
from seer.hosting.launch import ChildProcess

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


def test_a_server_that_is_killed_before_it_reads_its_settings_is_started_again(monkeypatch: pytest.MonkeyPatch) -> None:
    """Unread bytes make the end of its socket an error instead of the end of a file."""

    class KilledEarly(ChildProcess):
        num_killed = 0

        def __init__(self, *arguments: Any, **settings: Any) -> None:
            super().__init__(*arguments, **settings)
            if KilledEarly.num_killed < 2:
                KilledEarly.num_killed += 1
                os.kill(self.pid, signal.SIGSTOP)
                asyncio.get_running_loop().call_later(0.05, os.kill, self.pid, signal.SIGKILL)

    async def scenario() -> int:
        server = DraftServerProcess(max_restarts=9, restart_pause_s=0.0)
        await server.start()
        assert server.pid is not None
        monkeypatch.setattr(draft_server_process, "ChildProcess", KilledEarly)
        os.kill(server.pid, signal.SIGKILL)
        async with asyncio.timeout(DEADLINE_S):
            await server._is_down.wait()
            await server.wait_until_up()
        await server.close()
        return server.num_restarts

    assert asyncio.run(scenario()) == 3


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


def test_a_server_that_is_closed_while_its_death_is_handled_leaves_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    async def scenario() -> None:
        server = DraftServerProcess(max_restarts=0)
        await server.start()
        child = server._child
        assert child is not None
        is_waiting, wait = asyncio.Event(), child.wait

        async def stand_still(deadline_s: float) -> None:
            if not is_waiting.is_set():
                is_waiting.set()
                await asyncio.Event().wait()
            await wait(deadline_s)

        monkeypatch.setattr(child, "wait", stand_still)
        os.kill(child.pid, signal.SIGKILL)
        async with asyncio.timeout(60):
            await is_waiting.wait()
            await server.close()
        assert server.pid is None
        assert child._log.closed

    asyncio.run(scenario())


def test_servers_of_which_one_does_not_start_leave_none(monkeypatch: pytest.MonkeyPatch) -> None:
    pids: list[int] = []
    launch = DraftServerProcess._launch

    async def launch_or_fail(server: DraftServerProcess, address: str) -> str:
        if server is servers.processes[0]:
            raise DraftError("no process can be made")
        address = await launch(server, address)
        pids.append(server.pid or 0)
        return address

    async def scenario() -> None:
        with pytest.raises(DraftError, match="no process"):
            await servers.start()
        assert len(pids) == 1, "it was still starting"
        await servers.close()

    servers = DraftServers(2)
    monkeypatch.setattr(DraftServerProcess, "_launch", launch_or_fail)
    asyncio.run(scenario())
    assert not Path(f"/proc/{pids[0]}").exists()
