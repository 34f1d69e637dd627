# SPDX-License-Identifier: Apache-2.0
"""How many files and connections this process may have open."""

from __future__ import annotations

import resource

WANTED = 65_536
"""As vLLM asks for. The usual limit is 1,024, which a connection for each of 1,024 instances exceeds."""


def allow_descriptors(wanted: int = WANTED) -> int:
    """Raise the limit to so many, or as far as the system lets this process; never lower it. Returns the limit."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    most = wanted if hard == resource.RLIM_INFINITY else min(wanted, hard)
    if soft != resource.RLIM_INFINITY and soft < most:
        resource.setrlimit(resource.RLIMIT_NOFILE, (most, hard))
        return most
    return soft
