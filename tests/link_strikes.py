# SPDX-License-Identifier: Apache-2.0
"""Faults of the connection between the driver and an instance on another machine: `LINK_STRIKES`, by name."""

from __future__ import annotations

import random

from dial_hosting import DialledProcess
from seer.hosting.fleet import HostedFleet
from strikes import STRIKES, Strike
from tcp_relay import Direction, LinkFault


def _strike(fault: LinkFault) -> Strike:
    def strike(fleet: HostedFleet, rng: random.Random) -> None:
        child = rng.choice(fleet.instances)._child
        direction: Direction = rng.choice(["up", "down"])
        if isinstance(child, DialledProcess):
            child.relay.strike(direction, fault)

    return strike


LINK_STRIKES: dict[str, Strike] = {
    "cut a connection": _strike("cut"),
    "hold a connection for good": _strike("hold"),
    "falsify a byte of a connection": _strike("falsify"),
    "slow a connection down": _strike("slow"),
    "tear a connection's bytes apart": _strike("tear"),
} | {name: strike for name, strike in STRIKES.items() if not name.endswith(("message", "messages"))}
