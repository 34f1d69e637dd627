# SPDX-License-Identifier: Apache-2.0
"""The connection of this process to a Ray cluster."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import socket
from typing import Any

from seer.errors import ConfigError, MissingExtra

AUTO = "auto"
"""The cluster that this machine is part of."""
_PROBE_DEADLINE_S = 10.0


def import_ray() -> Any:
    """Ray, which is an extra."""
    try:
        import ray
    except ImportError:
        raise MissingExtra("ray", "ray") from None
    return ray


def _refuse_silent_address(address: str) -> None:
    """Raise if nothing listens at HOST:PORT: Ray itself would try for minutes."""
    if address == AUTO:
        return
    host, colon, port = address.rpartition(":")
    if not colon or not port.isdigit() or "/" in host:
        raise ValueError("it is not HOST:PORT")
    socket.create_connection((host, int(port)), timeout=_PROBE_DEADLINE_S).close()


class RayCluster:
    """Joined from `connect` to `close`; one that the caller's program had joined before stays so."""

    def __init__(self, address: str) -> None:
        self._address = address
        self._is_ours = False
        self._joining: asyncio.Future[None] | None = None
        self.ray = import_ray()
        self.host = ""
        """This machine's address, as the other nodes know it."""

    async def connect(self) -> None:
        """Join the cluster as a driver."""
        if not self.ray.is_initialized():
            self._joining = asyncio.ensure_future(asyncio.to_thread(self._join))
            await asyncio.shield(self._joining)  # its thread goes on when this is cancelled: `close` waits for it
        joined = str(self.ray.get_runtime_context().gcs_address)
        if self._address not in (AUTO, joined):
            raise ConfigError(
                f"this program has joined the Ray cluster at {joined}, not {self._address}", hint="ray='auto' takes it"
            )
        self.host = str(self.ray.util.get_node_ip_address())

    def _join(self) -> None:
        try:
            _refuse_silent_address(self._address)
            self.ray.init(address=self._address, log_to_driver=False, logging_level=logging.ERROR)
            self._is_ours = True
        except (OSError, ValueError, RuntimeError) as error:  # a ConnectionError is an OSError
            where = "on this machine" if self._address == AUTO else f"at {self._address}"
            raise ConfigError(
                f"no Ray cluster can be joined {where}: {str(error).splitlines()[0]}",
                hint="`ray start --head` on one machine, `ray start --address=HOST:6379` on the others",
            ) from None

    @property
    def is_joined(self) -> bool:
        """Whether calls can be made: without this check a call would start a cluster."""
        return bool(self.ray.is_initialized())

    def nodes(self) -> dict[str, dict[str, Any]]:
        """The nodes that are alive, by id."""
        return {node["NodeID"]: node for node in self.ray.nodes() if node["Alive"]}

    def resources_text(self) -> str:
        """What the cluster has, for messages."""
        shown = {name: amount for name, amount in self.ray.cluster_resources().items() if name in ("CPU", "GPU")}
        nodes = self.nodes()
        return f"{len(nodes)} nodes with {', '.join(f'{amount:g} {name}' for name, amount in sorted(shown.items()))}"

    async def close(self) -> None:
        """Leave the cluster if `connect` joined it; Ray then ends what is left of this driver."""
        if self._joining is not None:
            await asyncio.gather(self._joining, return_exceptions=True)
        if self._is_ours and self.is_joined:
            self._is_ours = False
            with contextlib.suppress(Exception):  # whatever Ray still waits for: the fleet is over
                await asyncio.to_thread(self.ray.shutdown)
