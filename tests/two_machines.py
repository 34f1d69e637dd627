# SPDX-License-Identifier: Apache-2.0
"""Two machines on one: network and mount namespaces with a cable between them, each with its own /dev/shm and Ray node.

Traffic stays on that cable: neither namespace has another link. Everything in them ends with `close`, which kills the
processes of the two namespaces and no others. Needs root, `unshare`, `nsenter` and `ip`.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

DEADLINE_S = 60.0
PORT = 6379
_HOLD = "mount -t tmpfs -o size=2g,mode=1777 tmpfs /dev/shm && ip link set lo up && echo up && exec sleep 100000"


def why_not() -> str | None:
    """Why there can be no namespaces here; None if there can."""
    if os.geteuid():
        return "namespaces need root"
    missing = [name for name in ("unshare", "nsenter", "ip") if shutil.which(name) is None]
    if missing:
        return f"not installed: {', '.join(missing)}"
    probe = subprocess.run(["unshare", "--net", "--mount", "true"], capture_output=True, check=False)
    return None if probe.returncode == 0 else f"no namespaces: {probe.stderr.decode().strip()}"


class Machine:
    """One of the two."""

    def __init__(self, number: int, folder: Path) -> None:
        self.number = number
        self.address = address_of(number)
        self.folder = folder
        """Ray's own files; the paths of its sockets must be short."""
        self._holder = subprocess.Popen(
            ["unshare", "--net", "--mount", "sh", "-c", _HOLD], stdout=subprocess.PIPE, start_new_session=True
        )
        assert self._holder.stdout is not None
        assert self._holder.stdout.readline() == b"up\n", "the namespaces were not made"

    @property
    def pid(self) -> int:
        """Of a process that keeps the namespaces."""
        return self._holder.pid

    def command(self, *words: str) -> list[str]:
        """A command as it must be run to run here."""
        return in_namespaces(self.pid, *words)

    def run(self, *words: str) -> str:
        return subprocess.run(
            self.command(*words), capture_output=True, text=True, check=True, timeout=DEADLINE_S
        ).stdout

    def start_ray(
        self,
        *,
        num_cpus: int,
        head: Machine | None = None,
        options: Sequence[str] = (),
        environment: Mapping[str, str] | None = None,
    ) -> None:
        """Start a node here: the head of a cluster, or one that joins it."""
        head_number = head.number if head is not None else None
        done = subprocess.run(
            [*ray_start(self.pid, self.number, num_cpus=num_cpus, head=head_number, folder=self.folder), *options],
            capture_output=True,
            text=True,
            check=False,
            timeout=DEADLINE_S,
            env={**ray_environment(), **(environment or {})},
        )
        assert done.returncode == 0, done.stdout + done.stderr

    def processes(self) -> dict[int, str]:
        """Every process here but the one that keeps the namespaces, with its command."""
        return processes_of(self.pid)

    def kill_all(self) -> None:
        """Lose power: every process here ends at once."""
        kill_processes(self.pid)

    def shared_memory(self) -> list[str]:
        """Files of Seer in this machine's /dev/shm."""
        listed = self.run("find", "/dev/shm", "-mindepth", "2", "-path", "*seer*")
        return [line for line in listed.splitlines() if line]

    def close(self) -> None:
        self.kill_all()
        self._holder.kill()
        self._holder.wait()
        assert self._holder.stdout is not None
        self._holder.stdout.close()


def address_of(number: int) -> str:
    return f"198.18.77.{number}"


def in_namespaces(holder: int, *words: str) -> list[str]:
    """A command as it must be run to run where this process is."""
    return ["nsenter", "-t", str(holder), "-m", "-n", f"--wd={os.getcwd()}", *words]


def ray_start(holder: int, number: int, *, num_cpus: int, head: int | None, folder: Path | None = None) -> list[str]:
    """The command that starts a Ray node on a machine: the head of a cluster, or one that joins `head`."""
    role = ["--head", f"--port={PORT}", "--include-dashboard=false"]
    if head is not None:
        role = [f"--address={address_of(head)}:{PORT}"]
    sizes = [f"--num-cpus={num_cpus}", "--object-store-memory=100000000"]
    where = [f"--node-ip-address={address_of(number)}", *([f"--temp-dir={folder}"] if folder is not None else [])]
    ray = [sys.executable, "-m", "ray.scripts.scripts", "start"]
    return in_namespaces(holder, *ray, *role, *where, *sizes, "--disable-usage-stats")


def processes_of(holder: int) -> dict[int, str]:
    """Every process in the network namespace of this one but itself, with its command."""
    namespace, found = os.readlink(f"/proc/{holder}/ns/net"), {}
    for entry in Path("/proc").iterdir():
        with contextlib.suppress(OSError):
            if entry.name.isdigit() and os.readlink(entry / "ns/net") == namespace:
                found[int(entry.name)] = (entry / "cmdline").read_bytes().replace(b"\0", b" ").decode()
    found.pop(holder, None)
    return found


def kill_processes(holder: int) -> None:
    """End them all at once."""
    last_s = time.monotonic() + DEADLINE_S
    while alive := processes_of(holder):
        for pid in alive:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        assert time.monotonic() < last_s, f"still there: {alive}"
        time.sleep(0.05)


def ray_environment() -> dict[str, str]:
    """Of Ray's processes and of drivers. Ray would run its workers, and so the instances, behind all other work, and
    would ask for the token that another of its clusters has left in this user's home.
    """
    quiet = {"RAY_USAGE_STATS_ENABLED": "0", "RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO": "0", "OMP_NUM_THREADS": "1"}
    return {**os.environ, **quiet, "RAY_worker_niceness": "0", "RAY_AUTH_MODE": "disabled"}


@contextlib.contextmanager
def two_machines(
    num_cpus: tuple[int, int] = (2, 1),
    *,
    options: Sequence[str] = (),
    environment: Mapping[str, str] | None = None,
) -> Iterator[tuple[Machine, Machine]]:
    """Both, with a cable between them and a Ray node of so many CPUs on each.

    `options` are further ones of `ray start`; what Ray starts on the nodes has this environment.
    """
    home = Path(tempfile.mkdtemp(prefix="s2m"))
    machines: list[Machine] = []
    try:
        for number in (1, 2):
            machines.append(Machine(number, home / str(number)))
        one, two = machines
        link = ["ip", "link", "add", "eth0", "netns", str(one.pid), "type", "veth", "peer", "name", "eth0"]
        subprocess.run([*link, "netns", str(two.pid)], check=True, capture_output=True, timeout=DEADLINE_S)
        for machine in machines:
            machine.run("ip", "addr", "add", f"{machine.address}/24", "dev", "eth0")
            machine.run("ip", "link", "set", "eth0", "up")
            machine.run("ip", "route", "add", "default", "dev", "eth0")
        one.start_ray(num_cpus=num_cpus[0], options=options, environment=environment)
        two.start_ray(num_cpus=num_cpus[1], head=one, options=options, environment=environment)
        yield one, two
    finally:
        for machine in machines:
            machine.close()
        shutil.rmtree(home, ignore_errors=True)
