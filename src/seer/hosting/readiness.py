# SPDX-License-Identifier: Apache-2.0
"""The start of an instance's process, seen from the driver: wait for its first message, and say why none came."""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine
from typing import Any, TypeVar

from seer.config import HostingConfig
from seer.errors import DeadlineExceeded, InstanceError, SeerError
from seer.hosting.launcher import Child
from seer.hosting.messages import Ready, StartFailed, revive_error

T = TypeVar("T")

LATE = "raise start_deadline_s where it only needs longer; log_dir keeps the whole log (both of rollout.hosting)"
"""What to do about a start that took too long."""


async def await_ready(instance: int, child: Child, options: HostingConfig) -> Ready:
    """The message that a process sends once it can serve. Raises what kept it from that, or that it took too long."""
    try:
        async with asyncio.timeout(options.start_deadline_s):
            first = await child.channel.receive()
    except TimeoutError:
        # Its log goes with it. Another machine's is not asked for: that machine may be why.
        cause = await child.exit_cause() if child.node is None else None
        what = f"the start of instance {instance}"
        raise DeadlineExceeded(what, options.start_deadline_s, cause=cause, hint=LATE) from None
    if isinstance(first, StartFailed):
        raise await _start_failure(instance, child, first, options)
    if first is None:
        raise await _death(instance, child, options)
    assert isinstance(first, Ready), f"the first message is a {type(first).__name__}"
    return first


async def while_alive(instance: int, child: Child, options: HostingConfig, work: Coroutine[Any, Any, T]) -> T:
    """What `work` returns, for which a new process waits; raises if the process ends first."""
    working = asyncio.create_task(work)
    # Its first message answers the settings, which it does not have yet: what ends here is the connection.
    ending = asyncio.create_task(child.channel.receive())
    try:
        await asyncio.wait({working, ending}, return_when=asyncio.FIRST_COMPLETED)
        if not ending.done():
            return working.result()
    finally:
        working.cancel()
        ending.cancel()
        await asyncio.gather(working, ending, return_exceptions=True)
    raise await _death(instance, child, options)


async def _death(instance: int, child: Child, options: HostingConfig) -> InstanceError:
    await child.wait(options.close_deadline_s)
    return InstanceError(f"instance {instance} died while starting: {await child.exit_cause()}")


async def _start_failure(instance: int, child: Child, failed: StartFailed, options: HostingConfig) -> SeerError:
    """Why it did not start. An error of a library often names its cause in the log alone, which goes with it."""
    why = f"instance {instance}: {failed.error}"
    if failed.kind == InstanceError.__name__ and failed.hint is None:
        await child.wait(options.close_deadline_s)
        hint = "the whole log is in rollout.hosting.log_dir, if that names a folder"
        return InstanceError(f"{why}; {await child.exit_cause()}", hint=hint)
    return revive_error(why, failed.kind, failed.hint)
