# SPDX-License-Identifier: Apache-2.0
"""Kills a rollout server again and again, for tests only: `VERL_USE_EXTERNAL_MODULES=verl_cpu,verl_kills`.

SEER_KILLS lists the kinds of death, separated by commas. The server of replica 1 dies by the first; once it is back and
has the newest weights, by the second; and so on. Each leaves a file in SEER_KILLED.

    rollout    in the middle of a rollout, with chunks in flight
    sleep      when verl puts it to sleep after a rollout
    between    after that, while the trainer trains
    sync       while weights are sent, after the first message
"""

from __future__ import annotations

import asyncio
import itertools
import os
import signal
from pathlib import Path
from typing import Any

from verl_after_import import after_import

MIDDLE = 8
"""Chunks of the driver before the kill."""
SLEPT_S = 0.5
"""After it has fallen asleep: the trainer has begun to train, which takes longer."""
HOST = "SEER_TEST_HOST"


def is_due(kind: str) -> bool:
    """Whether this server is to die by this now; it counts as dead from now on."""
    if os.environ.get("VERL_REPLICA_RANK") != "1":
        return False
    dead, kinds = Path(os.environ["SEER_KILLED"]), os.environ["SEER_KILLS"].split(",")
    num_dead = len(list(dead.iterdir()))
    if num_dead >= len(kinds) or kinds[num_dead] != kind:
        return False
    (dead / f"{num_dead:03d}-{kind}").touch()
    return True


def strike(pid: int) -> None:
    """End a process as the system's memory killer does."""
    os.kill(pid, signal.SIGKILL)


def _change_server(module: Any) -> None:
    """Deaths on the way to sleep, and after it."""
    server = module.vLLMHttpServer  # the class that ours is made from
    usual_init, usual_sleep = server.__init__, server.sleep

    def init(self: Any, *args: Any, **kwargs: Any) -> None:
        os.environ[HOST] = str(os.getpid())  # for its workers
        usual_init(self, *args, **kwargs)

    async def sleep(self: Any) -> None:
        await usual_sleep(self)
        if self.global_steps is None:
            return  # it was started just now
        if is_due("sleep"):
            strike(os.getpid())
        elif is_due("between"):
            asyncio.get_running_loop().call_later(SLEPT_S, strike, os.getpid())

    server.__init__, server.sleep = init, sleep


def _change_instance(module: Any) -> None:
    """Deaths in a rollout."""
    instance = module.HostedVllm
    usual_submit, num_submitted = instance.submit, itertools.count(1)

    def submit(self: Any, chunk: Any) -> None:
        usual_submit(self, chunk)
        if next(num_submitted) % MIDDLE == 0 and is_due("rollout"):
            strike(os.getpid())

    instance.submit = submit


CHANGES = {
    "verl.workers.rollout.vllm_rollout.vllm_async_server": _change_server,
    "seer.engine.vllm.hosted": _change_instance,
}
"""By module; a server's process imports them after verl itself, which loads this plug-in."""

after_import(CHANGES)
