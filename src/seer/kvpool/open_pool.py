# SPDX-License-Identifier: Apache-2.0
"""Opens a pool by its settings, in any process."""

from __future__ import annotations

from typing import Any

from seer.kvpool.base import Pool


def open_pool(settings: dict[str, Any]) -> Pool:
    """Open a pool in this process; its backend, `local` unless stated, takes the other settings."""
    own = dict(settings)
    backend = own.pop("backend", "local")
    if backend == "mooncake":
        from seer.kvpool.mooncake import MooncakePool, MooncakePoolConfig

        return MooncakePool(MooncakePoolConfig(**own))
    from seer.kvpool.local import LocalPool
    from seer.kvpool.local_files import LocalPoolConfig

    return LocalPool(LocalPoolConfig(**own))
