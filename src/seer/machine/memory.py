# SPDX-License-Identifier: Apache-2.0
"""The memory that this process may use in all: the machine's, or that of its container where it is less."""

from __future__ import annotations

import functools
import os
from pathlib import Path

from seer.errors import ConfigError
from seer.machine.sizes import show_size

_LIMIT_FILES = (Path("/sys/fs/cgroup/memory.max"), Path("/sys/fs/cgroup/memory/memory.limit_in_bytes"))
"""Of the container, by version of control groups. Without a limit the first holds `max`, the second a huge number."""


@functools.cache
def total_memory_bytes() -> int:
    """Main memory, used or free. Refusals name it, so it does not change from one moment to the next."""
    total = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    return min([total, *_container_limits()])


def refuse_beyond_memory(num_bytes: int, what: str, option: str) -> None:
    """Refuse a size that was asked for and that this machine cannot hold, with one that fits."""
    total = total_memory_bytes()
    if num_bytes > total:
        raise ConfigError(
            f"{what} of {show_size(num_bytes)}, and this machine has {show_size(total)} of memory",
            hint=f"{option} {total // 2}, for example",
        )


def _container_limits() -> list[int]:
    found = []
    for path in _LIMIT_FILES:
        try:
            text = path.read_text().strip()
        except OSError:
            continue
        if text.isdigit():
            found.append(int(text))
    return found
