# SPDX-License-Identifier: Apache-2.0
"""A small process beside an agent that holds shared memory, weights or KV: it frees them when the agent is killed.

    python -m seer.hosting.ray.janitor FD      FD is one end of a socket pair, the agent has the other

Ray ends the actors of a driver that is gone with a signal that none of them can act on. Weights and KV are gigabytes,
so they must not wait for the next run on that node.

It forks, and its parent ends, before it waits: so it is no child of the agent, in case Ray stops an actor's child
processes together with the actor.

Waits for                                    unblocked by
  the agent's end                              its death, or its `close`
"""

from __future__ import annotations

import os
import socket
import sys

from seer.engine.staged_weights import remove_orphaned_folders
from seer.hosting.fleet_pool import remove_orphaned_pools


def main() -> None:
    """Wait until the agent has ended, then remove the folders and pools whose owner is gone."""
    if os.fork():
        os._exit(0)
    with socket.socket(fileno=int(sys.argv[1])) as agent:
        agent.recv(1)  # nothing is ever sent: this returns at the end of file, when the agent's locks are free
    remove_orphaned_folders()
    remove_orphaned_pools()


if __name__ == "__main__":
    main()
