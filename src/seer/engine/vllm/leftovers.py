# SPDX-License-Identifier: Apache-2.0
"""What vLLM's processes would leave behind when they are killed: shared memory, semaphores, sockets, temporary files.

On a CPU the engine and its worker talk through segments named `psm_*` and semaphores named `sem.mp-*`, the ranks of a
tensor-parallel engine through segments named after the file at which they meet. Once all have mapped them, the names
are not needed: the system frees a segment without a name when its last process ends, however it ends. Sockets and
temporary files go into a folder of this process, the host, which the next process removes if this one is killed.
Segments are named after that folder, or after a file in it, and go with it, so that also a kill during the start leaves
nothing. For that the engine's processes end with the host, from their beginning on: otherwise an engine without a host
would finish its start and go on.

Compiled kernels are kept for the next start, in this user's private folder: PyTorch's own place for them is a name in
the temporary folder that another user can take first, and PyTorch loads and runs what is there.
"""

from __future__ import annotations

import os
import tempfile
from pathlib import Path

from seer.machine import owned_folders, private_files
from seer.machine.owned_segments import name_segments_after
from seer.machine.parent_death import end_with_process

_KIND = "vllm"
_SOCKETS = "VLLM_RPC_BASE_PATH"
"""Where vLLM makes its sockets; its processes inherit it."""
_HOST = "SEER_VLLM_HOST"
"""The process that places the files; those that it starts inherit its id."""
_PREFIXES = ("/dev/shm/psm_", "/dev/shm/sem.mp-", "/dev/shm/vllm_dist_")
"""The names that Python's `multiprocessing` gives, and vLLM to the memory between its ranks."""

_KERNELS = "TORCHINDUCTOR_CACHE_DIR"
_MAX_HOME_CHARS = 48
"""Of this user's folder. The path of a socket has room for 107; the folder made there and vLLM's name take 59."""


def unname_segments(pid: int) -> None:
    """Remove the names of the segments that a process has mapped; the memory stays."""
    for line in Path(f"/proc/{pid}/maps").read_text().splitlines():
        path = line.split(maxsplit=5)[-1]
        if path.startswith(_PREFIXES) and not path.endswith("(deleted)"):
            Path(path).unlink(missing_ok=True)


def place_files() -> Path:
    """Before the engine starts: have it make sockets and temporary files in a new folder, which the caller removes."""
    temporary = tempfile.gettempdir()
    fits = len(os.fsencode(private_files.folder(temporary))) <= _MAX_HOME_CHARS
    folder = owned_folders.make_folder(_KIND, temporary if fits else private_files.SHARED_MEMORY)
    if _is_of_everyone(os.environ.get(_KERNELS, ""), temporary):
        os.environ[_KERNELS] = str(private_files.folder(temporary) / "kernels")
    os.environ |= {_SOCKETS: str(folder), "TMPDIR": str(folder), _HOST: str(os.getpid())}
    name_segments_after(folder)
    return folder


def _is_of_everyone(kernels: str, temporary: str) -> bool:
    """Whether a place of kernels is none, or PyTorch's own: it writes that into the environment when it is imported."""
    place = Path(kernels)
    return not kernels or (place.name.startswith("torchinductor_") and place.parent == Path(temporary))


def name_segments() -> None:
    """In a process that vLLM started: segments are named after the engine's folder, if it is ours."""
    folder = Path(os.environ.get(_SOCKETS, ""))
    if folder.name.startswith(f"{_KIND}-"):
        name_segments_after(folder)


def end_with_host() -> None:
    """In a process that vLLM started: it ends with the host of its engine, however that ends."""
    host = os.environ.get(_HOST)
    if host is not None and int(host) != os.getpid():
        end_with_process(int(host))
