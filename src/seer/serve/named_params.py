# SPDX-License-Identifier: Apache-2.0
"""Weights tensor by tensor, as `trl vllm-serve` takes them: a call for each tensor, answered before it is broadcast.

No call says that an update is complete. TRL's trainers end theirs with /reset_prefix_cache/, and a script that goes on
with /generate/ or /chat/ wants the new weights: these, and /close_communicator/, switch the instances to them.

Waits for                                    unblocked by
  the trainer, in a background task            its broadcast, the deadlines of the group
  `settle`                                     the task's end, the end of what runs under the old weights

Invariants
  1. Tensors are received in the order in which they were announced.
  2. No more than MAX_WAITING tensors are announced and not yet received.
  3. What went wrong after a call was answered is the answer to the next one.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Coroutine
from typing import Any

from seer.serve.refusals import Refusal, bad_request
from seer.serve.weight_group import Meeting, TensorInfo, WeightGroup
from seer.serve.weight_updates import Update, WeightUpdates

log = logging.getLogger(__name__)
_MEET = "POST /init_communicator/ first"
MAX_WAITING = 1024
"""TRL broadcasts each tensor before it announces the next."""


class NamedParams:
    """The update that is under way, and the group it comes through."""

    def __init__(self, group: WeightGroup, weights: WeightUpdates) -> None:
        self._group = group
        self._weights = weights
        self._last: asyncio.Task[None] | None = None
        """The newest of the tasks that wait for the trainer; each waits for the one before it."""
        self._is_open = False
        self._num_waiting = 0

    def meet(self, at: Meeting) -> None:
        """Meet the trainer, which comes after the answer to this call."""
        self._drop()
        self._last = self._start(self._group.meet(at))

    def take(self, tensor: TensorInfo) -> None:
        """Receive a tensor, which is broadcast after the answer to this call."""
        if self._last is None:
            raise bad_request("there is no group with a trainer", hint=_MEET)
        self._raise_failure()
        if self._num_waiting >= MAX_WAITING:
            raise Refusal(429, f"{MAX_WAITING:,} tensors are announced and not broadcast", hint="broadcast them first")
        self._group.refuse_too_large([tensor])
        if not self._is_open:
            self._weights.start()
            self._is_open = True
        update = self._weights.announce([tensor.num_bytes()])
        self._num_waiting += 1
        self._last = self._start(self._receive(update, tensor, self._last))

    async def settle(self) -> None:
        """Switch the instances to the tensors that were received; nothing happens if there are none."""
        if not self._is_open or self._last is None:
            return
        await asyncio.wait([self._last])
        self._raise_failure()
        if self._is_open:  # no other call was faster
            self._is_open = False
            await self._weights.finish()

    async def leave(self) -> None:
        """Use what was received, and forget the trainer."""
        try:
            await self.settle()
        finally:
            self._last = None
            await self._group.leave()

    async def _receive(self, update: Update, tensor: TensorInfo, after: asyncio.Task[None]) -> None:
        async def received() -> dict[str, Any]:
            return {tensor.name: await self._group.receive_one(tensor)}

        try:
            await after
            await self._weights.receive(update, received())
        finally:
            self._num_waiting -= 1

    def _start(self, work: Coroutine[Any, Any, None]) -> asyncio.Task[None]:
        task = asyncio.create_task(work)
        task.add_done_callback(_log_failure)
        return task

    def _raise_failure(self) -> None:
        """Forget a group that broke, and say why."""
        if self._last is None or not self._last.done() or self._last.exception() is None:
            return
        error = self._last.exception()
        self._drop()
        if isinstance(error, Refusal):
            raise error
        raise bad_request(f"the group with the trainer broke: {type(error).__name__}: {error}"[:300], hint=_MEET)

    def _drop(self) -> None:
        self._last = None
        if self._is_open:
            self._is_open = False
            self._weights.drop()


def _log_failure(task: asyncio.Task[None]) -> None:
    if not task.cancelled() and task.exception() is not None:
        log.warning("weights of the trainer: %s", task.exception())
