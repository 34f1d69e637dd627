# SPDX-License-Identifier: Apache-2.0
"""A thread that starts and watches processes of a Mooncake store inside another program's process.

The kernel ends these processes with the thread that started them (mooncake_servers.py). So one thread starts them,
restarts what dies and stops them; it lives until `stop` or the end of the program.

Waits for                                    unblocked by
  the start                                    the thread; mooncake_servers.py has the deadlines
  the next look                                WATCH_S, `stop`
"""

from __future__ import annotations

import logging
import threading
from concurrent.futures import Future

from seer.kvpool.mooncake_servers import MooncakeServers, MooncakeServersConfig

log = logging.getLogger(__name__)

WATCH_S = 1.0


class MooncakeKeeper:
    """Keeps the servers of a configuration running from construction to `stop`."""

    def __init__(self, config: MooncakeServersConfig) -> None:
        self._ended = threading.Event()
        started: Future[MooncakeServers] = Future()
        self._thread = threading.Thread(target=self._keep, args=(config, started), name="seer-mooncake", daemon=True)
        self._thread.start()
        self.servers = started.result()

    def _keep(self, config: MooncakeServersConfig, started: Future[MooncakeServers]) -> None:
        try:
            servers = MooncakeServers(config)
        except BaseException as error:  # raised where the keeper is made
            started.set_exception(error)
            return
        with servers:
            started.set_result(servers)
            while not self._ended.wait(WATCH_S):
                for note in servers.watch():
                    log.warning("Mooncake: %s", note)

    def stop(self) -> None:
        """End the processes; what they held in DRAM is gone."""
        self._ended.set()
        self._thread.join()
