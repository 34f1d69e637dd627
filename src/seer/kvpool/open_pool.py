# SPDX-License-Identifier: Apache-2.0
"""Opens a pool by its settings, in any process."""

from __future__ import annotations

from typing import Any

from seer.kvpool.base import Pool


def open_pool(settings: dict[str, Any]) -> Pool:
    """Open a pool in this process; its backend, `local` unless stated, takes the other settings.

    With `near`, the settings of another pool, that one is the near tier of this one.
    """
    own = dict(settings)
    near = own.pop("near", None)
    if near is not None:
        return _open_over(near, own)
    backend = own.pop("backend", "local")
    if backend == "mooncake":
        from seer.kvpool.mooncake import MooncakePool, MooncakePoolConfig

        return MooncakePool(MooncakePoolConfig(**own))
    from seer.kvpool.local import LocalPool
    from seer.kvpool.local_files import LocalPoolConfig

    return LocalPool(LocalPoolConfig(**own))


def _open_over(near: dict[str, Any], far: dict[str, Any]) -> Pool:
    from seer.kvpool.node_pool import NodePool

    opened = open_pool(near)
    try:
        return NodePool(opened, open_pool(far))
    except BaseException:
        opened.close()
        raise
