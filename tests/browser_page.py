# SPDX-License-Identifier: Apache-2.0
"""A page in a real Chromium without a window, driven by its debugging protocol over a pipe: evaluate, press keys, and
read what a screen reader is told.
"""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import IO, Any

CHROMIUM = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")
QUIET = ("--headless", "--no-sandbox", "--disable-gpu", "--window-size=1200,1400")
_FIRST_FD = 20
"""The browser has its pipe at 3 and 4: what becomes that must be neither."""


class BrowserPage:
    """One page; each call waits for the browser's answer."""

    def __init__(self, to: IO[bytes], back: IO[bytes], url: str) -> None:
        self._to, self._back = to, back
        self._num_calls = 0
        self._session: str | None = None
        target = self._call("Target.createTarget", url=url)["targetId"]
        self._session = self._call("Target.attachToTarget", targetId=target, flatten=True)["sessionId"]

    def evaluate(self, expression: str) -> Any:
        """The value of an expression in the page."""
        reply = self._call("Runtime.evaluate", expression=expression, returnByValue=True)
        assert "exceptionDetails" not in reply, reply
        return reply["result"].get("value")

    def press(self, key: str) -> None:
        """Press a key, wherever the focus is."""
        for kind in ("keyDown", "keyUp"):
            self._call("Input.dispatchKeyEvent", type=kind, key=key, text=key if kind == "keyDown" else "")

    def accessible(self, role: str) -> list[dict[str, Any]]:
        """What a screen reader is told of the parts with this role: name, description and properties."""
        nodes = self._call("Accessibility.getFullAXTree")["nodes"]
        return [
            {
                "name": node.get("name", {}).get("value", ""),
                "description": node.get("description", {}).get("value", ""),
                **{one["name"]: one["value"].get("value") for one in node.get("properties", ())},
            }
            for node in nodes
            if not node.get("ignored") and node.get("role", {}).get("value") == role
        ]

    def _call(self, method: str, **params: Any) -> dict[str, Any]:
        self._num_calls += 1
        message: dict[str, Any] = {"id": self._num_calls, "method": method, "params": params}
        if self._session is not None:
            message["sessionId"] = self._session
        self._to.write(json.dumps(message).encode() + b"\0")
        self._to.flush()
        while True:
            answer = json.loads(self._read())
            if answer.get("id") == self._num_calls:
                assert "error" not in answer, (method, answer)
                result: dict[str, Any] = answer["result"]
                return result

    def _read(self) -> bytes:
        parts = bytearray()
        while (one := self._back.read(1)) != b"\0":
            assert one, "the browser has ended"
            parts += one
        return bytes(parts)


@contextlib.contextmanager
def a_browser_page(url: str, home: Path) -> Iterator[BrowserPage]:
    """The page at an address, in a browser that keeps its files in `home`."""
    assert CHROMIUM is not None
    ours_in, theirs_out = (_high(fd) for fd in os.pipe())
    theirs_in, ours_out = (_high(fd) for fd in os.pipe())
    words = (CHROMIUM, *QUIET, f"--user-data-dir={home}/chromium", "--remote-debugging-pipe", "about:blank")
    placed = f'exec "$@" 3<&{theirs_in} 4>&{theirs_out}'
    with open(ours_out, "wb") as to, open(ours_in, "rb") as back:
        process = subprocess.Popen(
            ["bash", "-c", placed, "bash", *words], pass_fds=(theirs_in, theirs_out), stderr=subprocess.DEVNULL
        )
        os.close(theirs_in)
        os.close(theirs_out)
        try:
            yield BrowserPage(to, back, url)
        finally:
            process.terminate()
            process.wait(60)


def _high(descriptor: int) -> int:
    moved = fcntl.fcntl(descriptor, fcntl.F_DUPFD_CLOEXEC, _FIRST_FD)
    os.close(descriptor)
    return moved
