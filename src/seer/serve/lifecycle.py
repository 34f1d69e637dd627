# SPDX-License-Identifier: Apache-2.0
"""Pause, resume, sleep, wake and abort, as vLLM's RL endpoints have them.

`keep` freezes what runs until `resume`; `wait` lets it end first; `abort` cancels it, and clients get what there is
with `finish_reason: abort`. Requests that come while the server is paused wait.

Sleeping is a pause: the memory of the instances stays theirs. Trainers that share a GPU with the server cannot rely on
it for room.
"""

from __future__ import annotations

from collections.abc import Callable

from seer.serve.backend import Backend
from seer.serve.gate import Gate

MODES = ("abort", "wait", "keep")
"""What `pause` does with what runs."""


class Lifecycle:
    """The pauses of a server."""

    def __init__(self, backend: Backend, gate: Gate, cancel_running: Callable[[], int]) -> None:
        self._backend = backend
        self._gate = gate
        self._cancel_running = cancel_running
        self._is_frozen = False
        self.is_sleeping = False

    async def pause(self, mode: str) -> None:
        """Stop generating; new requests wait from now on."""
        self._gate.pause()
        if mode == "keep":
            self._is_frozen = True
            await self._backend.pause()
            return
        await self.thaw()  # what is frozen would never end
        if mode == "abort":
            self._cancel_running()
        await self._backend.session.drain()

    async def thaw(self) -> None:
        """Let what was frozen go on; new requests still wait. A weight update needs this: no response may have tokens
        of two versions, so what runs ends under the old one.
        """
        if self._is_frozen:
            self._is_frozen = False
            await self._backend.resume()

    async def resume(self) -> None:
        """Generate again."""
        await self.thaw()
        self.is_sleeping = False
        self._gate.resume()
