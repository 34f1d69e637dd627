# SPDX-License-Identifier: Apache-2.0
"""Where `seer serve` gets its keys: files and the environment, never the command line."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

pytest.importorskip("fastapi")

from seer.cli.main import main
from seer.cli.serve import _key
from seer.serve.keys import Keys

KEY = "a-key-of-23-characters!"


@pytest.mark.parametrize("words", [("--api-key", KEY), (f"--admin-key={KEY}",)])
def test_a_key_on_the_command_line_is_refused_and_not_repeated(
    words: tuple[str, ...], capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit, match="2"):
        main(["serve", "--model", "x", *words])
    shown = capsys.readouterr()
    assert "give the key in a file" in shown.err
    assert KEY not in shown.out + shown.err


def test_a_key_of_the_environment_does_not_stay_there(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("SEER_API_KEY", f" {KEY}\n")
    assert _key(None, "SEER_API_KEY") == KEY
    assert "SEER_API_KEY" not in os.environ
    assert _key(None, "SEER_API_KEY") is None
    (tmp_path / "key").write_text("the-key-of-the-file\n")
    (tmp_path / "key").chmod(0o600)
    monkeypatch.setenv("SEER_API_KEY", KEY)
    assert _key(tmp_path / "key", "SEER_API_KEY") == "the-key-of-the-file"
    assert "SEER_API_KEY" not in os.environ


def test_the_password_of_a_url_is_the_key() -> None:
    """As TRL's client, which is built on requests, sends it."""
    requests = pytest.importorskip("requests")
    from starlette.datastructures import Headers

    key = "a-key-of-some-24-letters"
    asked = requests.Session().prepare_request(requests.Request("POST", f"http://seer:{key}@127.0.0.1:8000/pause"))
    Keys(admin=key).check(Headers(dict(asked.headers)), is_admin=True)
