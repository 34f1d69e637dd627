# SPDX-License-Identifier: Apache-2.0
"""Kills rollout servers again and again, for tests only: `VERL_USE_EXTERNAL_MODULES=verl_cpu,verl_kills`.

SEER_KILLS lists deaths, separated by commas, each as KIND:REPLICA@STEP. Each leaves a file in SEER_KILLED.

    rollout    in the middle of a rollout, with chunks in flight
    sleep      when verl puts the server to sleep after a rollout
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


def is_due(kind: str, step: int | None) -> bool:
    """Whether this server is to die by this now; it counts as dead from now on."""
    dead, death = Path(os.environ["SEER_KILLED"]), f"{kind}:{os.environ.get('VERL_REPLICA_RANK')}@{step}"
    if death not in os.environ["SEER_KILLS"].split(",") or (dead / death).exists():
        return False
    (dead / death).touch()
    return True


def step_of_sync() -> int | None:
    """The step that is being trained, for the workers of a server, which do not know it. None before the first."""
    noted = _note()
    return int(noted.read_text()) if noted.exists() else None


def strike(pid: int) -> None:
    """End a process as the system's memory killer does."""
    os.kill(pid, signal.SIGKILL)


def _note() -> Path:
    rank = os.environ.get("VERL_REPLICA_RANK")
    return Path(os.environ["SEER_KILLED"]).with_name(f"step-{rank}")


def _change_server(module: Any) -> None:
    """Deaths on the way to sleep, and after it."""
    server = module.vLLMHttpServer  # the class that ours is made from
    usual_init, usual_sleep, usual_version = server.__init__, server.sleep, server.set_global_steps

    def init(self: Any, *args: Any, **kwargs: Any) -> None:
        os.environ[HOST] = str(os.getpid())  # for its workers
        usual_init(self, *args, **kwargs)
        _note().unlink(missing_ok=True)

    async def set_global_steps(self: Any, global_steps: int) -> None:
        await usual_version(self, global_steps)
        _note().write_text(str(global_steps + 1))

    async def sleep(self: Any) -> None:
        await usual_sleep(self)
        if self.global_steps is None:
            return  # it was started just now
        if is_due("sleep", self.global_steps + 1):
            strike(os.getpid())
        elif is_due("between", self.global_steps + 1):
            asyncio.get_running_loop().call_later(SLEPT_S, strike, os.getpid())

    server.__init__, server.sleep, server.set_global_steps = init, sleep, set_global_steps


def _change_instance(module: Any) -> None:
    """Deaths in a rollout."""
    instance = module.HostedVllm
    usual_submit, num_submitted = instance.submit, itertools.count(1)

    def submit(self: Any, chunk: Any) -> None:
        usual_submit(self, chunk)
        if next(num_submitted) % MIDDLE == 0 and is_due("rollout", step_of_sync()):
            strike(os.getpid())

    instance.submit = submit


CHANGES = {
    "verl.workers.rollout.vllm_rollout.vllm_async_server": _change_server,
    "seer.engine.vllm.hosted": _change_instance,
}
"""By module; a server's process imports them after verl itself, which loads this plug-in."""

after_import(CHANGES)
