# SPDX-License-Identifier: Apache-2.0
"""Start, watch and stop the processes of a Mooncake store: one master, one owner of DRAM and SSD.

Workers own no memory of the store and attach to the owner through shared memory, so a worker's death loses no block.
Mooncake does not watch its processes; this file does.

Invariants
  1. Nothing is started before its ports are known to be free; nothing is reported as up before it answers.
  2. An owner is not restarted before `client_ttl_s` + 2 s have passed: sooner, and its SSD tier vanishes when
     the old one's time is up (upstream issue 3052).
  3. The master binds the host it was given, loopback by default. The owner's data ports always bind every
     interface: `wildcard_listeners` finds them, and `seer pool up` warns of them (serve.py).
  4. Stopping ends exactly the processes that were started here; they also end when the thread that started
     them ends for any reason.
"""

from __future__ import annotations

import ctypes
import dataclasses
import os
import signal
import socket
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from types import TracebackType
from typing import IO, Literal, Self

from seer.errors import ConfigError, MissingExtra, PoolError
from seer.machine import owned_folders
from seer.machine.addresses import free_ports

_libc = ctypes.CDLL(None)  # loaded before any fork: loading takes a lock, which must not happen after one
_PR_SET_PDEATHSIG = 1
_MIN_DRAM_OVER_SSD_BYTES = 512 << 20  # measured: 64 MiB never spilled and refused puts for good, 512 MiB did spill
_READY_DEADLINE_S = 30.0  # far above what a start takes; one that dies is noticed at once
_STOP_DEADLINE_S = 5.0  # then it is killed: nothing it holds is needed
_RESTART_GRACE_S = 2.0  # beyond `client_ttl_s`, for the master's own clock
NAMESPACE_RECIPE = (
    "`ip netns add seer && ip netns exec seer ip link set lo up`, then run everything under `ip netns exec seer`"
)


MooncakeProtocol = Literal["auto", "tcp", "rdma"]
PROTOCOLS = ("auto", "tcp", "rdma")
RDMA_DEVICES = Path("/sys/class/infiniband")
"""Where the kernel lists them, RoCE ones too."""


def transfer_protocol(asked: MooncakeProtocol) -> str:
    """The protocol for owners on this machine; Mooncake finds the devices itself."""
    if asked != "auto":
        return asked
    return "rdma" if RDMA_DEVICES.is_dir() and any(RDMA_DEVICES.iterdir()) else "tcp"


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class MooncakeServersConfig:
    """Sizes, places and times of a Mooncake store on this machine."""

    dram_bytes: int
    """Memory of the owner; 0 starts a master alone, for owners on other machines."""

    master_address: str = ""
    """host:port of a master on another machine that the owner joins; empty starts one here."""

    ssd_bytes: int = 0
    """Size of the SSD tier; 0 for none."""

    ssd_dir: str = ""
    """Folder of the SSD tier; must exist."""

    host: str = "127.0.0.1"
    """Where the master and the owner's control port listen."""

    master_port: int = 0
    """0: any free port."""

    owner_port: int = 0
    metrics_port: int = 0

    client_ttl_s: int = 10
    """The master forgets an owner that has been silent for this long."""

    lease_ms: int = 2000
    """How long a block that was looked up or read cannot be evicted. Mooncake's own default of 10 s makes a
    full store refuse puts for as long."""

    num_threads: int = 2
    """Threads of the owner."""

    protocol: MooncakeProtocol = "auto"
    """How owners of several machines reach each other; all must use the same. `auto` is `rdma` where this machine has
    a device for it, `tcp` otherwise."""

    log_dir: str = ""
    """Where the servers' logs go; empty for a temporary folder."""

    def __post_init__(self) -> None:
        if self.dram_bytes == 0 and self.master_address:
            raise ConfigError(f"mooncake dram_bytes=0 and master_address={self.master_address!r}: nothing to start")
        if 0 < self.dram_bytes < 16 << 20:
            raise ConfigError(f"mooncake dram_bytes={self.dram_bytes} is below 16 MiB, the least an owner takes")
        if self.protocol not in PROTOCOLS:
            raise ConfigError(f"mooncake protocol={self.protocol!r}", hint=f"one of {', '.join(PROTOCOLS)}")
        if self.ssd_bytes and self.dram_bytes < _MIN_DRAM_OVER_SSD_BYTES:
            raise ConfigError(
                f"mooncake dram_bytes={self.dram_bytes} is too small over an SSD tier",
                hint=f"give at least {_MIN_DRAM_OVER_SSD_BYTES}: below its bucket size Mooncake spills nothing",
            )
        if self.ssd_bytes and not Path(self.ssd_dir).is_dir():
            raise ConfigError(f"mooncake ssd_dir={self.ssd_dir!r} is not a folder", hint="create it, or name another")


class MooncakeServers:
    """A master and an owner, or one of them, running from construction to `stop`."""

    def __init__(self, config: MooncakeServersConfig) -> None:
        self.config = config
        self._log_dir = (
            Path(config.log_dir)
            if config.log_dir
            else owned_folders.make_folder("mooncake-logs", tempfile.gettempdir())
        )
        ports = _free_ports(config.host, 3)
        self.master_address = config.master_address or f"{config.host}:{config.master_port or ports[0]}"
        self.owner_address = f"{config.host}:{config.owner_port or ports[1]}"
        self.metrics_address = f"{config.host}:{config.metrics_port or ports[2]}"
        self._master: subprocess.Popen[bytes] | None = None
        self._owner: subprocess.Popen[bytes] | None = None
        self._owner_seen_s = 0.0
        try:
            if not config.master_address:
                self._start_master()
            if config.dram_bytes:
                self._start_owner()
        except BaseException:
            self.stop()
            raise

    @property
    def pids(self) -> dict[str, int]:
        """Process ids, for `status`."""
        named = {"master": self._master, "owner": self._owner}
        return {name: process.pid for name, process in named.items() if process is not None}

    def watch(self) -> list[str]:
        """Restart what died and return notes on it; call it about once a second."""
        notes: list[str] = []
        try:
            self._restart(notes)
        except (PoolError, OSError) as error:
            notes.append(f"{error}: the next look tries again")
        return notes

    def _restart(self, notes: list[str]) -> None:
        now = time.monotonic()
        if self._master is not None and self._master.poll() is not None:
            notes.append(f"the master ended with {self._master.returncode}: DRAM contents are lost, starting it again")
            self._start_master()
        if self._owner is not None and self._owner.poll() is not None:
            wait_s = self._owner_seen_s + self.config.client_ttl_s + _RESTART_GRACE_S - now
            if wait_s > 0:
                notes.append(f"the owner is down: starting it again in {wait_s:.0f} s, once the master forgot it")
            else:
                notes.append("the owner is started again: DRAM contents are lost")
                self._start_owner()
        else:
            self._owner_seen_s = now

    def stop(self) -> None:
        """End both processes; what they held in DRAM is gone."""
        for process in (self._owner, self._master):
            if process is None or process.poll() is not None:
                continue
            process.terminate()
            try:
                process.wait(_STOP_DEADLINE_S)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait(_STOP_DEADLINE_S)
        self._owner = self._master = None
        if not self.config.log_dir:
            owned_folders.remove_folder(self._log_dir)

    def kill_owner(self) -> None:
        """End the owner as a crash would; for tests of what happens then."""
        assert self._owner is not None, "there is no owner to kill"
        self._owner.send_signal(signal.SIGKILL)
        self._owner.wait(_STOP_DEADLINE_S)

    def kill_master(self) -> None:
        """End the master as a crash would; for tests of what happens then."""
        assert self._master is not None, "there is no master to kill"
        self._master.send_signal(signal.SIGKILL)
        self._master.wait(_STOP_DEADLINE_S)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.stop()

    def _start_master(self) -> None:
        host, port = self.master_address.rsplit(":", 1)
        metrics_host, metrics_port = self.metrics_address.rsplit(":", 1)
        flags = [
            f"--rpc_address={host}",
            f"--rpc_port={port}",
            f"--metrics_host={metrics_host}",
            f"--metrics_port={metrics_port}",
            f"--client_ttl={self.config.client_ttl_s}",
            f"--default_kv_lease_ttl={self.config.lease_ms}",
            "--enable_metric_reporting=false",
            "--logtostderr",
        ]
        if self.config.ssd_bytes:  # eager offload loses blocks under load; at eviction it does not
            flags += ["--enable_offload=true", "--offload_on_evict=true", "--promotion_on_hit=true"]
            flags += ["--promotion_admission_threshold=1", "--promotion_max_per_heartbeat=32"]
            # Earlier and more at a time than by default (0.9, 0.05): while nothing is free every put is refused.
            flags += ["--eviction_high_watermark_ratio=0.8", "--eviction_ratio=0.1"]
        self._master = self._spawn("mooncake_master", flags, {})
        self._wait_ready(self._master, self.master_address, "master")

    def _start_owner(self) -> None:
        host, port = self.owner_address.rsplit(":", 1)
        flags = [
            f"--host={host}",
            f"--port={port}",
            f"--global_segment_size={self.config.dram_bytes}",
            "--local_buffer_size=67108864",
            "--metadata_server=P2PHANDSHAKE",
            f"--master_server_address={self.master_address}",
            f"--protocol={transfer_protocol(self.config.protocol)}",
            f"--threads={self.config.num_threads}",
        ]
        environment = {"MC_LOG_LEVEL": "ERROR"}
        if self.config.ssd_bytes:
            flags.append("--enable_offload=true")
            environment |= {
                "MOONCAKE_OFFLOAD_FILE_STORAGE_PATH": str(Path(self.config.ssd_dir).resolve()),
                "MOONCAKE_OFFLOAD_STORAGE_BACKEND_DESCRIPTOR": "bucket_storage_backend",
                "MOONCAKE_OFFLOAD_HEARTBEAT_INTERVAL_SECONDS": "1",
                "MOONCAKE_OFFLOAD_LOCAL_BUFFER_SIZE_BYTES": str(128 << 20),
                "MOONCAKE_OFFLOAD_BUCKET_MAX_TOTAL_SIZE": str(self.config.ssd_bytes),
                "MOONCAKE_OFFLOAD_BUCKET_EVICTION_POLICY": "lru",
            }
        self._owner = self._spawn("mooncake_client", flags, environment)
        self._wait_ready(self._owner, self.owner_address, "owner")
        self._owner_seen_s = time.monotonic()

    def _spawn(self, program: str, flags: list[str], environment: dict[str, str]) -> subprocess.Popen[bytes]:
        path = Path(sys.executable).parent / program
        if not path.exists():
            raise MissingExtra("mooncake-transfer-engine-non-cuda", "mooncake")
        log: IO[bytes]
        with open(self._log_dir / f"{program}.log", "ab") as log:
            os.fchmod(log.fileno(), 0o600)
            return subprocess.Popen(
                [str(path), *flags],
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                env={**os.environ, **environment},
                start_new_session=True,  # Ctrl-C reaches this process alone, which stops them in order
                preexec_fn=_die_with_parent,  # noqa: PLW1509 - one system call, nothing that takes a lock
            )

    def _wait_ready(self, process: subprocess.Popen[bytes], address: str, what: str) -> None:
        host, port = address.rsplit(":", 1)
        deadline = time.monotonic() + _READY_DEADLINE_S
        while time.monotonic() < deadline:
            if process.poll() is not None:
                raise PoolError(
                    f"the Mooncake {what} ended with {process.returncode}: {self._last_line(process)}",
                    hint=f"see {self._log_dir}; for libibverbs.so.1: apt-get install libibverbs1",
                )
            try:
                socket.create_connection((host, int(port)), timeout=1.0).close()
                return
            except OSError:
                time.sleep(0.05)
        raise PoolError(f"the Mooncake {what} did not listen on {address} within {_READY_DEADLINE_S:g} s")

    def _last_line(self, process: subprocess.Popen[bytes]) -> str:
        program = Path(str(process.args[0])).name if isinstance(process.args, list) else "mooncake_master"
        lines = (self._log_dir / f"{program}.log").read_text(errors="replace").strip().splitlines()
        return lines[-1][:200] if lines else "its log is empty"


def _die_with_parent() -> None:
    """Ask the kernel to end this process with the thread that started it: no server outlives a killed run."""
    _libc.prctl(_PR_SET_PDEATHSIG, signal.SIGTERM)


def wildcard_listeners(pid: int) -> list[int]:
    """Ports on which a process listens on every interface of the machine; none where it has ended."""
    try:
        links = list(Path(f"/proc/{pid}/fd").iterdir())
        tables = [Path(f"/proc/{pid}/net/{table}").read_text() for table in ("tcp", "tcp6")]
    except OSError:
        return []
    inodes = set()
    for link in links:
        try:
            target = os.readlink(link)
        except OSError:  # closed since
            continue
        if target.startswith("socket:["):
            inodes.add(target[8:-1])
    ports = set()
    for table in tables:
        for line in table.splitlines()[1:]:
            fields = line.split()
            address, port = fields[1].rsplit(":", 1)
            if fields[3] == "0A" and fields[9] in inodes and set(address) == {"0"}:
                ports.add(int(port, 16))
    return sorted(ports)


def _free_ports(host: str, num: int) -> list[int]:
    try:
        return free_ports(host, num)
    except OSError as error:
        raise PoolError(f"cannot listen on {host}: {error}") from None
