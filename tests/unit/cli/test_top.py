# SPDX-License-Identifier: Apache-2.0
"""`seer top` reads what an address sends as types: whatever else it is, it is one line and exit code 1."""

from __future__ import annotations

import contextlib
import http.server
import json
import threading
from collections.abc import Iterator
from typing import Any

import pytest

from seer.cli import top
from seer.cli.main import main

STATE: dict[str, Any] = {
    "title": "a fleet",
    "now_s": 1.0,
    "requests": {"running": 3},
    "ended": {"stop": 4, "failed": 1},
    "tokens": 1234,
    "tokens_per_s": 10.5,
    "left_s": None,
    "even_s": 2,
    "migrations": 1,
    "lost_instances": 0,
    "weights_version": 2,
    "draft_tokens": 10,
    "accepted_tokens": 5,
    "instances": [{"is_up": True, "num_running": 3, "num_waiting": 0, "kv_usage": 0.25, "tokens": 1234}],
    "spans": [],
}


@contextlib.contextmanager
def a_server(body: bytes) -> Iterator[str]:
    class Handler(http.server.BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            with contextlib.suppress(OSError):  # the reader may leave early
                self.wfile.write(body)

        def log_message(self, *_: Any) -> None:
            pass

    server = http.server.HTTPServer(("127.0.0.1", 0), Handler)
    thread = threading.Thread(target=server.serve_forever)
    thread.start()
    try:
        yield f"http://127.0.0.1:{server.server_port}"
    finally:
        server.shutdown()
        thread.join()
        server.server_close()


def answer(content: bytes) -> bytes:
    return b"HTTP/1.0 200 OK\r\n\r\n" + content


def event(state: Any) -> bytes:
    return answer(b"data: " + json.dumps(state).encode() + b"\n\n")


BAD = {
    "an empty object": event({}),
    "a list": event([]),
    "a number": event(5),
    "half": answer(b'data: {"title": \n\n'),
    "no JSON": answer(b"data: \xff\xfe\n\n"),
    "deep": answer(b"data: " + b"[" * 100_000 + b"\n\n"),
    "nothing": answer(b""),
    "another page": answer(b"<html>hello</html>"),
    "no HTTP": b"SSH-2.0-hello\r\n",
    "cut": b"HTTP/1.1 200 OK\r\nContent-Length: 1000\r\n\r\ndata: {",
    **{f"without {name}": event({k: v for k, v in STATE.items() if k != name}) for name in top.State.__struct_fields__},
    **{f"text in {name}": event(STATE | {name: [["x"]]}) for name in top.State.__struct_fields__},
    **{
        f"{value!r:.9} in {name}": event(STATE | {name: value})
        for name in ("tokens", "tokens_per_s", "left_s", "weights_version")
        for value in (-1, 10**400)
    },
    "text in an instance": event(STATE | {"instances": [STATE["instances"][0] | {"kv_usage": "x"}]}),
}


@pytest.mark.parametrize("json_option", [[], ["--json"]])
@pytest.mark.parametrize("name", BAD)
def test_what_is_no_state_is_one_line(name: str, json_option: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    with a_server(BAD[name]) as url:
        assert main(["top", url, "--once", *json_option]) == 1
    shown = capsys.readouterr().err
    assert shown.startswith(f"error: {url} ")
    assert "bug" not in shown
    assert len(shown.splitlines()) <= 2


def test_a_server_that_wants_a_key_and_an_address_that_is_none_have_hints_of_their_own(
    capsys: pytest.CaptureFixture[str],
) -> None:
    with a_server(b"HTTP/1.0 401 Unauthorized\r\n\r\n") as url:
        assert main(["top", url, "--once"]) == 1
    assert "--api-key-file" in capsys.readouterr().err
    with a_server(b"HTTP/1.0 404 Not Found\r\n\r\n") as url:
        assert main(["top", url, "--once"]) == 1
    assert "is a `seer serve` there?" in capsys.readouterr().err
    with pytest.raises(SystemExit, match="2"):
        main(["top", "localhost:8000", "--once"])
    assert "write http://HOST:PORT" in capsys.readouterr().err


def test_a_line_without_an_end_is_read_up_to_a_limit(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(top, "MAX_LINE_BYTES", 1000)
    with a_server(answer(b"data: " + b" " * 2000)) as url:
        assert main(["top", url, "--once"]) == 1
    assert "a line of more than 1,000 bytes" in capsys.readouterr().err


def test_a_state_is_shown_without_control_characters(capsys: pytest.CaptureFixture[str]) -> None:
    with a_server(event(STATE | {"title": "a \x1b]0;fleet\x07", "new": "field"})) as url:
        assert main(["top", url, "--once"]) == 0
        shown = capsys.readouterr().out
        assert main(["top", url, "--once", "--json"]) == 0
        assert json.loads(capsys.readouterr().out)["new"] == "field"
    assert "a ?]0;fleet?" in shown
    assert "1,234 tokens" in shown
    assert "\x1b]" not in shown
