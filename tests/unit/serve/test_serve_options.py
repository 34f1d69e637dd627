# SPDX-License-Identifier: Apache-2.0
"""Options of `seer serve` that are wrong end it before anything starts, with a hint that fits."""

from __future__ import annotations

import socket

import pytest

pytest.importorskip("fastapi")

from seer.cli.main import main
from seer.errors import ConfigError
from seer.serve.keys import Keys
from seer.serve.settings import ServeSettings
from seer.serve.uvicorn_server import bind

FAKE = ("--engine", "fake", "--model", "none", "--port", "0")
KEYS = Keys(api="an-api-key-of-24-letters")


@pytest.mark.parametrize("endpoint", ["127.0.0.1:4318", "collector", "ftp://collector", "http://", "http://[::1"])
def test_an_endpoint_for_spans_that_is_no_address(endpoint: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit, match="2"):
        main(["serve", *FAKE, "--otlp-endpoint", endpoint])
    assert "is no address" in capsys.readouterr().err


def test_a_port_in_use_and_an_address_of_another_machine_have_hints_of_their_own() -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        with pytest.raises(ConfigError) as caught:
            bind(ServeSettings(port=taken.getsockname()[1]))
    assert "--port 0" in str(caught.value.hint)
    with pytest.raises(ConfigError, match=r"cannot listen on 203\.0\.113\.9") as caught:
        bind(ServeSettings(host="203.0.113.9", port=0, keys=KEYS))  # an address for documentation
    assert "--host" in str(caught.value.hint)


def test_the_help_of_serve_names_no_option_of_another_verb(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit, match="0"):
        main(["serve", "--help"])
    assert "--max-tokens" not in capsys.readouterr().out
