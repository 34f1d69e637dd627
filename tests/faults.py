"""Faults that tests inject into a running rollout."""

from __future__ import annotations

import os
import signal

from seer.engine.host import ProcessInstance
from seer.metrics.events import Event, Stopped


class KillOnce:
    """An event sink that kills an instance's process, once: at the first chunk to end of a request after `request`.

    Once, because events go on while the driver has not noticed the death yet, and the process id is then nobody's.
    """

    def __init__(self, victim: ProcessInstance, *, request: int = -1) -> None:
        self._victim = victim
        self._request = request
        self._done = False

    def __call__(self, event: Event) -> None:
        if isinstance(event, Stopped) and event.request > self._request and not self._done and self._victim.is_up:
            assert self._victim.pid is not None
            self._done = True
            os.kill(self._victim.pid, signal.SIGKILL)
