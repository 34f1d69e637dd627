# SPDX-License-Identifier: Apache-2.0
"""An instance that dials in from this process, as one inside another program's process does."""

from __future__ import annotations

import asyncio

from seer.config import HostingConfig
from seer.engine.base import OutputSink
from seer.engine.instance_wrapper import InstanceWrapper
from seer.engine.prepare import InstanceSpec
from seer.hosting import ProcessInstance
from seer.hosting.launcher import DialLauncher
from seer.hosting.process import OnLost
from seer.hosting.remote.dial import Dial
from seer.hosting.remote.listener import Listener
from seer.hosting.serving import Factory, serve_instance

HERE = "127.0.0.1"


def _ignore(instance: int, reason: str) -> None:
    """A loss that a test does not look at."""


class Dialled(InstanceWrapper[ProcessInstance]):
    """The driver's end of an instance, with the other end as a task of this event loop."""

    def __init__(self, make: Factory, *, options: HostingConfig | None = None, on_lost: OnLost = _ignore) -> None:
        self.listener = Listener(HERE, encrypted=True)
        self.serving: list[asyncio.Task[None]] = []
        self._make = make
        super().__init__(
            ProcessInstance(
                0,
                InstanceSpec(factory="", settings={}),
                options=options or HostingConfig(pin_cores=False),
                launcher=DialLauncher(self.listener, self._start),
                on_lost=on_lost,
            )
        )

    async def _start(self, id: int, dial: Dial) -> None:
        self.serving.append(asyncio.create_task(serve_instance(dial, self._make)))

    async def start(self, sink: OutputSink) -> None:
        await self.listener.start()
        await self.inner.start(sink)

    async def close(self) -> None:
        await self.inner.close()
        await asyncio.gather(*self.serving)
        await self.listener.close()
