# SPDX-License-Identifier: Apache-2.0
"""New weights over HTTP: from safetensors under `--weights-dir`, or broadcast by a trainer.

A broadcast update is started, gets tensors in any number of calls, and is finished; only then do the instances change.
From its start the server takes no request (503); what runs ends under the old weights.

Invariants
  1. A path of a request is opened only if it is under `--weights-dir` after every link is followed.
  2. The tensors of one update, in all of its calls, have no more bytes than the machine and no more than MAX_TENSORS.
  3. Updates come one after another; one that its trainer left behind is dropped by the next start, or after
     `update_idle_s` in which no tensor was being received.
  4. Tensors that were announced for one update never become part of another.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Awaitable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from seer.engine.base import Weights
from seer.machine.memory import total_memory_bytes
from seer.serve.backend import Backend
from seer.serve.gate import Gate
from seer.serve.lifecycle import Lifecycle
from seer.serve.refusals import Refusal, bad_request
from seer.serve.settings import ServeSettings

MAX_TENSORS = 1 << 18
"""Of one update. The largest models have some hundred thousand."""


@dataclass(eq=False, slots=True)
class Update:
    """A broadcast update that is under way."""

    closed: contextlib.ExitStack
    """Keeps the gate closed."""
    tensors: dict[str, Any] = field(default_factory=dict)
    num_tensors: int = 0
    num_bytes: int = 0
    """As announced: a tensor that is sent again counts again."""
    num_coming: int = 0
    """Calls whose tensors are being received."""
    timer: asyncio.TimerHandle | None = None


class WeightUpdates:
    """The weight updates of a server."""

    def __init__(self, backend: Backend, gate: Gate, lifecycle: Lifecycle, settings: ServeSettings) -> None:
        self._backend = backend
        self._gate = gate
        self._lifecycle = lifecycle
        self._weights_dir = settings.weights_dir
        self._idle_s = settings.limits.update_idle_s
        self._lock = asyncio.Lock()
        self._update: Update | None = None

    @property
    def is_started(self) -> bool:
        """Whether a broadcast update is under way."""
        return self._update is not None

    async def from_path(self, path: str) -> int:
        """Read weights from a folder or safetensors file; returns the new version."""
        found = self.resolve(path)
        with self._gate.updating():
            return await self._apply(found)

    def start(self) -> None:
        """Begin a broadcast update: no request starts until `finish`."""
        self.drop()
        self._update = update = Update(contextlib.ExitStack())
        update.closed.enter_context(self._gate.updating())
        self._restart_timer(update)

    def announce(self, tensor_bytes: Sequence[int]) -> Update:
        """Tensors of these sizes are about to be received for this update; refused if it would be too large."""
        update = self._started()
        num_tensors, num_bytes = update.num_tensors + len(tensor_bytes), update.num_bytes + sum(tensor_bytes)
        most = total_memory_bytes()
        if num_bytes > most or num_tensors > MAX_TENSORS:
            raise bad_request(
                f"the update would have {num_tensors:,} tensors of {num_bytes:,} bytes",
                hint=f"at most {MAX_TENSORS:,} of {most:,} bytes in all; a new update starts from 0",
            )
        update.num_tensors, update.num_bytes = num_tensors, num_bytes
        return update

    async def receive(self, update: Update, tensors: Awaitable[Mapping[str, Any]]) -> None:
        """Wait for tensors that were announced, and take them."""
        update.num_coming += 1
        self._restart_timer(update)
        try:
            received = await tensors
        finally:
            update.num_coming -= 1
            self._restart_timer(update)
        if update is not self._update:
            raise bad_request("the weight update is over", hint="it was finished, dropped or started anew before")
        update.tensors.update(received)

    async def finish(self) -> int:
        """Switch every instance to the tensors of the update; returns the new version."""
        update = self._started()
        if not update.tensors:
            self.drop()
            raise bad_request("the weight update has no tensor", hint="POST /update_weights between start and finish")
        closed = update.closed.pop_all()
        self.drop()  # the next one may be started while this one waits for what runs
        with closed:
            return await self._apply(update.tensors)

    def drop(self) -> None:
        """Forget an update that was started; requests start again."""
        update, self._update = self._update, None
        if update is not None:
            update.closed.close()
            self._restart_timer(update)

    def resolve(self, path: str) -> Path:
        """A path of a request, if it may be opened."""
        if self._weights_dir is None:
            raise Refusal(403, "weights are read from no file", hint="start the server with --weights-dir DIR")
        allowed = self._weights_dir.resolve()
        try:
            found = (allowed / path).resolve(strict=True)
        except (OSError, ValueError, RuntimeError):  # missing, a NUL, a loop of links
            found = None
        if found is None or not found.is_relative_to(allowed):
            # One answer for both, so that nothing outside the folder can be probed.
            raise bad_request(f"no weights at {path[:200]!r} under --weights-dir", param="path")
        return found

    async def _apply(self, weights: Weights) -> int:
        async with self._lock:
            await self._lifecycle.thaw()
            await self._backend.session.update_weights(weights)
            return self._backend.weights_version

    def _started(self) -> Update:
        if self._update is None:
            raise bad_request("no weight update was started", hint="POST /start_weight_update first")
        return self._update

    def _restart_timer(self, update: Update) -> None:
        """It runs while the update is under way and none of its tensors come."""
        if update.timer is not None:
            update.timer.cancel()
        if update is self._update and not update.num_coming:
            update.timer = asyncio.get_running_loop().call_later(self._idle_s, self.drop)
