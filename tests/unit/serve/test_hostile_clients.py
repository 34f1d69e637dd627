# SPDX-License-Identifier: Apache-2.0
"""Clients and files that mean no good: bodies that do not come, origins that are none, keys that others can read."""

from __future__ import annotations

import asyncio
import json
import os
from collections.abc import AsyncIterator
from pathlib import Path

import pytest

pytest.importorskip("fastapi")

from seer.errors import InputError
from seer.metrics.fleet_sample import FleetSample
from seer.metrics.live_counts import LiveCounts
from seer.serve.bodies import MAX_UNREAD_BODIES
from seer.serve.keys import MAX_KEY_FILE_BYTES, Keys, read_key
from seer.serve.live import LivePage
from seer.serve.settings import Limits, ServeSettings
from seer.serve.tool_calls import split_tool_calls
from seer.serve.watch import _from_this_machine
from served import a_server, until

BODY = json.dumps({"prompt": [1], "max_tokens": 1}).encode()
KEY = "a-key-of-some-24-letters"


def test_a_body_that_does_not_come_is_given_up() -> None:
    async def half() -> AsyncIterator[bytes]:
        yield BODY[:5]
        await asyncio.Event().wait()

    async def scenario() -> None:
        async with a_server(ServeSettings(limits=Limits(body_idle_s=0.05))) as served:
            reply = await served.client.post("/v1/completions", content=half())
            assert (reply.status_code, reply.headers["connection"]) == (408, "close")
            assert "for 0.05 s" in reply.json()["error"]["message"]
            assert served.service.bodies._num_held == 0
            assert (await served.client.post("/v1/completions", content=BODY)).status_code == 200

    asyncio.run(scenario())


def test_bodies_that_wait_have_one_amount_of_memory_for_all_of_them() -> None:
    async def scenario() -> None:
        released = asyncio.Event()

        async def slow() -> AsyncIterator[bytes]:
            yield BODY + b" " * (900 - len(BODY))
            await released.wait()
            yield b" "

        async with a_server(ServeSettings(limits=Limits(max_body_bytes=1000))) as served:
            slow_ones = [
                asyncio.create_task(served.client.post("/v1/completions", content=slow()))
                for _ in range(MAX_UNREAD_BODIES)
            ]
            await until(lambda: served.service.bodies._num_held == 900 * MAX_UNREAD_BODIES)
            refused = await served.client.post("/v1/completions", content=slow())
            assert (refused.status_code, refused.headers["retry-after"]) == (429, "1")
            assert "seer:requests_refused_total 1.0" in (await served.get("/metrics")).text
            released.set()
            assert {reply.status_code for reply in await asyncio.gather(*slow_ones)} == {200}
            assert served.service.bodies._num_held == 0

    asyncio.run(scenario())


@pytest.mark.parametrize("origin", ["http://[", "http://]", "//[::1", "null", "\x7f", ""])
def test_an_origin_that_is_no_address_is_another_one(origin: str) -> None:
    async def scenario() -> None:
        async with a_server() as served:
            for path in ("/v1/models", "/is_paused"):
                assert (await served.get(path, headers={"Origin": origin})).status_code == 403

    asyncio.run(scenario())


def test_the_page_beside_a_rollout_refuses_such_an_origin_too() -> None:
    from starlette.requests import Request
    from starlette.responses import Response

    async def work(request: Request) -> Response:
        return Response("shown")

    request = Request({"type": "http", "headers": [(b"host", b"127.0.0.1:1"), (b"origin", b"http://[")]})
    assert asyncio.run(_from_this_machine(work)(request)).status_code == 403  # type: ignore[arg-type]


def test_a_key_file_that_others_can_read_or_that_is_no_file_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "key"
    path.write_text(f" {KEY}\n")
    for mode in (0o640, 0o604, 0o644, 0o660):
        path.chmod(mode)
        with pytest.raises(InputError, match="other users can read it") as caught:
            read_key(path)
        assert caught.value.hint == f"chmod 600 {path}"
        assert KEY not in str(caught.value)
    path.chmod(0o600)
    assert Keys(api=read_key(path)).api == KEY
    os.mkfifo(tmp_path / "fifo", 0o600)
    with pytest.raises(InputError, match="is no file with a key"):
        read_key(tmp_path / "fifo")
    with pytest.raises(InputError, match="cannot be read"):
        read_key(tmp_path)
    path.write_bytes(b"k" * (MAX_KEY_FILE_BYTES + 1))
    with pytest.raises(InputError, match="is no file with a key"):
        read_key(path)
    path.write_bytes("schlüssel-mit-24-zeichen".encode())
    with pytest.raises(InputError, match="no header can carry") as caught:
        read_key(path)
    assert "schl" not in str(caught.value)


def test_a_response_of_opening_tags_is_text_and_costs_one_pass() -> None:
    text = "<tool_call>" * 300_000  # with a pass for each of them: hours
    assert split_tool_calls(text) == (text, [])
    before, calls = split_tool_calls('x <tool_call>{"name": "f"}</tool_call> and <tool_call>{"name": "g"}</tool_call>')
    assert (before, [call["function"]["name"] for call in calls]) == ("x ", ["f", "g"])
    nested = "<tool_call>" + "[" * 100_000 + "</tool_call>"
    assert split_tool_calls(nested) == (nested, [])


def test_no_text_of_the_live_page_ends_its_script() -> None:
    async def page() -> str:
        live = LivePage(LiveCounts(), lambda: FleetSample(instances=[]), "</script><script>alert(1)//<!--")
        return bytes(live.page().body).decode()

    text = asyncio.run(page())
    assert text.count("<script") == text.count("</script") == 1
    assert "alert(1)" in text
