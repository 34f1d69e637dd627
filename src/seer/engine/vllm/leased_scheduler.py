# SPDX-License-Identifier: Apache-2.0
"""vLLM's scheduler with leases: how far a request may run is set while it runs.

vLLM ends a request when it has `max_tokens` of the scheduler's own record of it. A chunk therefore reaches vLLM with
the limit of its whole response, and its lease is written to that record: at first when it is added, and again by each
call of `renew_leases`. A park lowers it to the end of the block that the request is in, because only whole blocks are
kept. So a lease ends as every limit of vLLM does: at a step boundary, with its last tokens and with its KV saved by the
connector, also with asynchronous scheduling.

The front end reaches the scheduler by a utility call. vLLM looks its method up on the engine by name, and `install`
puts it there. Calls and new requests come in order on one socket, but the front end may send a call before it has sent
the request. Such leases are kept until the request is added. Runs number their requests from 0, so leases name their
run: one that came after its request had ended must not be given to a request of a later run.

Used in vLLM 0.26 to 0.33: `add_request`, `Request.max_tokens` and utility calls are the same there.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING, Any

import msgspec
from vllm.v1.core.sched.scheduler import Scheduler
from vllm.v1.engine.core import EngineCore

from seer.engine.vllm.chunk_facts import ChunkFacts, NameOrNone, read_facts
from seer.engine.vllm.shared_cores import share_cores
from seer.ranges import Count, CountOrZero, Seed

if TYPE_CHECKING:
    from vllm.v1.request import Request

RENEW = "seer_renew_leases"
"""The utility call; its arguments are those of `LeasedScheduler.renew_leases`."""
MAX_EARLY = 1024
"""Leases kept for requests that were not added yet. Those of requests that have ended are among them, oldest first."""
Key = tuple[str, int, int]
"""Run, request and attempt."""
_Attempt = tuple[Seed, CountOrZero]
_Lease = tuple[Seed, CountOrZero, Count]
"""Request, attempt, tokens in all."""
_Renewal = tuple[NameOrNone, list[_Lease], list[_Attempt]]


class LeasedScheduler(Scheduler):
    """Ends requests where their leases end."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._leased: dict[Key, Request] = {}
        self._early: dict[Key, int] = {}  # leases that came before their request; 0 for a park
        install()
        share_cores()

    def add_request(self, request: Request) -> None:
        """Also read what it carries for Seer, once for this class and those that extend it."""
        self.enter(request, read_facts(request.sampling_params, request.num_tokens, name=request.request_id))
        super().add_request(request)

    def enter(self, request: Request, facts: ChunkFacts | None) -> None:
        """A request comes; without facts it is no chunk of ours. Set its first lease."""
        if facts is not None and facts.lease is not None:
            key = (facts.run, facts.request, facts.attempt)
            early = self._early.pop(key, None)
            lease = facts.lease if early is None else max(1, early and max(early, facts.lease))
            request.max_tokens = min(request.max_tokens, lease)
            self._leased[key] = request
            if len(self._leased) > 2 * len(self.requests) + 64:
                self._leased = {key: one for key, one in self._leased.items() if not one.is_finished()}

    def renew_leases(self, run: str, leases: Iterable[_Lease], parked: Iterable[_Attempt]) -> None:
        """Extend leases of a run, and end others with their block."""
        for number, attempt, max_tokens in leases:
            request = self._leased.get((run, number, attempt))
            if request is None:
                self._keep((run, number, attempt), max_tokens)
            else:
                request.max_tokens = max(request.max_tokens, max_tokens)
        for number, attempt in parked:
            request = self._leased.get((run, number, attempt))
            if request is None:
                self._keep((run, number, attempt), 0)
            else:
                # The KV of all tokens but the last is kept; the next token is being computed already.
                to_block_end = -request.num_tokens % self.block_size
                request.max_tokens = min(request.max_tokens, request.num_output_tokens + 1 + to_block_end)

    def _keep(self, key: Key, max_tokens: int) -> None:
        self._early[key] = max_tokens
        if len(self._early) > MAX_EARLY:
            del self._early[next(iter(self._early))]


def install() -> None:
    """Let this process's engine find the utility call."""

    def renew(engine: Any, run: Any, leases: Any, parked: Any) -> None:  # vLLM counts the parameters
        # What is refused fails the call, and not the engine.
        engine.scheduler.renew_leases(*msgspec.convert((run, leases, parked), _Renewal))

    setattr(EngineCore, RENEW, renew)
