# SPDX-License-Identifier: Apache-2.0
"""A scheduler that parks requests at random and withholds extensions at random, around a real one."""

from __future__ import annotations

import random
from collections.abc import Sequence

from seer.buffer import Request
from seer.fleet import Fleet
from seer.rollout import RolloutLoop
from seer.scheduling.base import Assignment, Renewal


class Meddling:
    """Passes every call on; `renew` answers otherwise now and then."""

    def __init__(self, loop: RolloutLoop, seed: int, *, park: float = 0.1, withhold: float = 0.2) -> None:
        self._loop, self._inner = loop, loop.scheduler
        self._dice = random.Random(seed)
        self._park, self._withhold = park, withhold
        self.num_parked = self.num_extended = 0

    def admit(self, requests: Sequence[Request], fleet: Fleet) -> None:
        self._inner.admit(requests, fleet)

    def requeue(self, request: Request) -> None:
        self._inner.requeue(request)

    def away(self, request: Request) -> None:
        self._inner.away(request)

    def finished(self, request: Request) -> None:
        self._inner.finished(request)

    def forget(self, family: int) -> None:
        self._inner.forget(family)

    def next(self, fleet: Fleet) -> Assignment | None:
        return self._inner.next(fleet)

    def renew(self, low: Sequence[Request], fleet: Fleet) -> Renewal:
        extended, parked = self._inner.renew(low, fleet)
        running = [request for request in self._loop.buffer.requests() if request.instance is not None]
        chosen = {request.id: request for request in parked}
        chosen |= {request.id: request for request in running if self._dice.random() < self._park / len(running)}
        kept = [one for one in extended if one.request.id not in chosen and self._dice.random() >= self._withhold]
        self.num_parked += len(chosen)
        self.num_extended += len(kept)
        return Renewal(kept, list(chosen.values()))
