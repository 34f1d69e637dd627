# SPDX-License-Identifier: Apache-2.0
"""verl's weight sync from a training rank to its server, which survives the server's death.

All ranks gather each tensor together. A rank whose server is gone therefore takes part to the end and sends nothing;
the server is started again after the next rollout, which the other servers do.

Invariants
  1. Every rank consumes the whole stream of tensors, whatever happens to its server: no rank waits for another for
     ever.
  2. A server that is alive and refuses the weights fails the training, with its error.
  3. A server that does not answer within weights_deadline_s is ended, and then counts as dead.

Waits for                                    unblocked by
  a server's answer to a bucket                the server, its death, its error, weights_deadline_s
  its other answers (waking up, falling        the same
  asleep, loading the last bucket, clearing
  its cache, taking the new version)
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import AsyncIterator, Awaitable
from typing import Any

import ray
from verl.workers.rollout.utils import ensure_async_iterator
from verl.workers.rollout.vllm_rollout.vllm_rollout import ServerAdapter

from seer.errors import ConfigError, DeadlineExceeded
from seer.integrations.verl.settings import read_settings
from seer.integrations.verl.weights_sender import ServerGone, WatchedSender

log = logging.getLogger(__name__)

_DEATHS = (ServerGone, ray.exceptions.RayActorError)


class SeerServerAdapter(ServerAdapter):
    """A training rank's way to its server."""

    server_handle: Any

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._deadline_s = read_settings(self.config.custom).weights_deadline_s

    def _ensure_server_handle(self) -> bool:
        """Find the server by its name each time: it may be another one than last time."""
        self.server_handle = None
        try:
            return bool(super()._ensure_server_handle())
        except ValueError as error:  # Ray knows no actor of this name
            raise ServerGone(str(error)) from None

    async def resume(self, tags: list[str]) -> None:
        """Wake the server up, unless it is gone."""
        await self._unless_gone(self._answered(super().resume(tags), "waking up"))

    async def release(self) -> None:
        """Put the server to sleep, unless it is gone."""
        await self._unless_gone(self._answered(super().release(), "falling asleep"))

    async def update_weights(
        self, weights: Any, global_steps: int | None = None, wire_format: str = "named_tensors", **kwargs: Any
    ) -> None:
        """Send the weights of this step."""
        if wire_format != "named_tensors":
            raise ConfigError(f"wire_format={wire_format!r} is not supported", hint="checkpoint_engine.backend=naive")
        stream = ensure_async_iterator(weights)
        try:
            await self._unless_gone(self._send(stream, global_steps, kwargs))
        finally:
            async for _ in stream:
                pass

    async def _send(self, stream: AsyncIterator[Any], global_steps: int | None, kwargs: dict[str, Any]) -> None:
        call = await self._execute_method(
            "update_weights_from_ipc", non_block=True, kwargs={**kwargs, "use_shm": self.use_shm}
        )
        sender = WatchedSender(
            self.zmq_handle,
            self.config.checkpoint_engine.update_weights_bucket_megabytes,
            use_shm=self.use_shm,
            receiver=call,
            is_alive=self._server_is_alive,
            deadline_s=self._deadline_s,
        )
        await sender.async_send_weights(stream)
        if call is None:
            return
        await self._answered(call, "loading the last weights")
        await self._answered(self.server_handle.clear_kv_cache.remote(), "clearing its cache")
        if global_steps is not None:
            await self._answered(self.server_handle.set_global_steps.remote(global_steps), "taking the new version")

    async def _answered(self, answer: Awaitable[Any], what: str) -> None:
        try:
            async with asyncio.timeout(self._deadline_s):
                await answer
        except TimeoutError:
            raise DeadlineExceeded(what, self._deadline_s) from None

    async def _unless_gone(self, work: Awaitable[None]) -> None:
        try:
            await work
        except _DEATHS as error:
            self._say_gone(error)
        except DeadlineExceeded as error:
            with contextlib.suppress(ValueError):  # its actor is dead by now
                ray.kill(self._server())
            self._say_gone(error)

    def _server_is_alive(self) -> bool:
        """Also for ranks that do not call the server themselves."""
        try:
            self._server()
        except ValueError:
            return False
        return True

    def _server(self) -> Any:
        """Ray raises ValueError where there is none."""
        return ray.get_actor(f"{self._get_server_name_prefix()}server_{self.replica_rank}_{self.node_rank}")

    def _say_gone(self, error: BaseException) -> None:
        log.warning("the server of replica %d is gone and gets no weights: %s", self.replica_rank, error)
