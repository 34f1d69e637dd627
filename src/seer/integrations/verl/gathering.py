# SPDX-License-Identifier: Apache-2.0
"""Siblings that are asked for one by one, submitted together.

verl's agent loops ask for the responses of a group in separate calls, within milliseconds. Submitted together they are
one group with one probe; a sibling that comes later joins the group's family. Only first turns are gathered: later ones
come when their tools have answered, each at another time.

Invariant: no request waits longer than GATHER_S for its siblings.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from dataclasses import dataclass, field

import msgspec

from seer.integrations.verl.requests import GenerateRequest
from seer.runs.response_handle import ResponseHandle

GATHER_S = 0.05
"""Long next to the calls of one group, short next to a response."""

Submit = Callable[[GenerateRequest, int], list[ResponseHandle]]
"""Asks for this many equal requests."""


@dataclass(slots=True)
class _Gathered:
    request: GenerateRequest
    waiting: list[asyncio.Future[ResponseHandle]] = field(default_factory=list)
    timer: asyncio.TimerHandle | None = None


class Gathering:
    """Collects requests of one group that are equal but for their names."""

    def __init__(self, submit: Submit) -> None:
        self._submit = submit
        self._open: dict[GenerateRequest, _Gathered] = {}

    async def join(self, request: GenerateRequest) -> ResponseHandle:
        """The handle of this request, once it was submitted with its siblings."""
        loop = asyncio.get_running_loop()
        request = msgspec.structs.replace(request, request_id="")
        gathered = self._open.get(request)
        if gathered is None:
            gathered = self._open[request] = _Gathered(request)
            gathered.timer = loop.call_later(GATHER_S, self._close, gathered)
        future: asyncio.Future[ResponseHandle] = loop.create_future()
        gathered.waiting.append(future)
        if len(gathered.waiting) >= request.num_siblings:
            self._close(gathered)
        return await future

    def _close(self, gathered: _Gathered) -> None:
        if self._open.get(gathered.request) is not gathered:
            return
        del self._open[gathered.request]
        if gathered.timer is not None:
            gathered.timer.cancel()
        waiting = [one for one in gathered.waiting if not one.done()]
        if not waiting:
            return
        try:
            handles = self._submit(gathered.request, len(waiting))
        except Exception as error:  # each of them raises it
            for one in waiting:
                one.set_exception(error)
            return
        for one, handle in zip(waiting, handles, strict=True):
            one.set_result(handle)
