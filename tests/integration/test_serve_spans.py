# SPDX-License-Identifier: Apache-2.0
"""`seer serve --otlp-endpoint` sends the spans of its requests, and serves on where nothing listens."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, HTTPServer

import pytest

pytest.importorskip("fastapi")
pytest.importorskip("opentelemetry.exporter.otlp.proto.http")

import httpx

from serve_process import a_serve_process

FAKE = ("--engine", "fake", "--model", "none", "--instances", "1", "--no-pin")


class Collector(HTTPServer):
    """Keeps the bodies of what is posted to it."""

    def __init__(self) -> None:
        self.bodies: list[bytes] = []
        super().__init__(("127.0.0.1", 0), Take)


class Take(BaseHTTPRequestHandler):
    def do_POST(self) -> None:
        assert isinstance(self.server, Collector)
        self.server.bodies.append(self.rfile.read(int(self.headers["Content-Length"])))
        self.send_response(200)
        self.end_headers()

    def log_message(self, format: str, *arguments: object) -> None:
        pass


@pytest.fixture
def collector() -> Iterator[Collector]:
    with Collector() as made:
        thread = threading.Thread(target=made.serve_forever)
        thread.start()
        yield made
        made.shutdown()
        thread.join()


def test_spans_arrive_at_the_collector(collector: Collector) -> None:
    with a_serve_process(*FAKE, "--otlp-endpoint", f"http://127.0.0.1:{collector.server_port}") as server:
        assert httpx.post(f"{server.url}/v1/completions", json={"prompt": [1], "n": 2}, timeout=60).status_code == 200
        server.stop()
    sent = b"".join(collector.bodies)
    assert sent.count(b"request") >= 2
    assert b"chunk" in sent
    assert b"seer.finish_reason" in sent
