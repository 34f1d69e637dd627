# SPDX-License-Identifier: Apache-2.0
"""The draft servers of a fleet: one for few instances, more for many. Clients spread groups over them by hash.

Every instance asks its groups' servers for siblings' tokens about forty times a second, so the work of one server grows
with the number of instances and of groups. A group lives on one server only, and servers know nothing of each other.

Invariants
  1. All servers have the same keys, so that an instance needs one pair.
  2. Addresses keep their order for the life of the fleet: a group's server is the same on every instance.
"""

from __future__ import annotations

import asyncio

from seer.drafting.curve_keys import ClientKeys, make_keys
from seer.hosting.draft_server_process import DraftServerProcess
from seer.machine.addresses import LOOPBACK

INSTANCES_PER_SERVER = 8
"""A server answers a question for 128 groups that have all grown in 1.3 ms (measured on a busy 2-core machine), and an
instance asks forty times a second: eight instances take at most about 40% of the server's one thread."""


def num_draft_servers(num_instances: int) -> int:
    """Servers for so many instances."""
    return -(-num_instances // INSTANCES_PER_SERVER)


class DraftServers:
    """Starts and ends the processes; each restarts by itself."""

    def __init__(
        self, num_servers: int, *, host: str = LOOPBACK, max_restarts: int = 3, restart_pause_s: float = 1.0
    ) -> None:
        """`host` is the address of this machine that the instances know."""
        keys = make_keys()
        self.client_keys: ClientKeys = keys[1]
        self.processes = [
            DraftServerProcess(host=host, max_restarts=max_restarts, restart_pause_s=restart_pause_s, keys=keys)
            for _ in range(num_servers)
        ]

    @property
    def addresses(self) -> tuple[str, ...]:
        """Where they listen, in the order that clients spread groups by."""
        return tuple(process.address for process in self.processes)

    async def start(self) -> None:
        """Launch all at once; if one fails, none is starting any more, and the caller closes those that did."""
        started = await asyncio.gather(*(process.start() for process in self.processes), return_exceptions=True)
        for result in started:
            if isinstance(result, BaseException):
                raise result

    def kill(self) -> None:
        """End all processes now and restart none."""
        for process in self.processes:
            process.kill()

    async def close(self) -> None:
        """End all processes."""
        await asyncio.gather(*(process.close() for process in self.processes))
