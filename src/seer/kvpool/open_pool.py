# SPDX-License-Identifier: Apache-2.0
"""Opens a pool by its settings, in any process."""

from __future__ import annotations

import logging
from typing import Any

from seer.errors import SeerError
from seer.kvpool.base import Pool
from seer.kvpool.none import LostPool

log = logging.getLogger(__name__)


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


def join_pool(settings: dict[str, Any]) -> Pool:
    """For an instance: the pool that the driver made. If its files were damaged since, one that holds nothing.

    So an instance that is restarted computes KV again; otherwise no restart would succeed as long as the run lasts.
    """
    try:
        return open_pool(settings)
    except (SeerError, OSError) as error:
        log.warning("the KV pool cannot be opened: KV of requests that move is computed again; %s", error)
        return LostPool()
