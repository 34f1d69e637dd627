# SPDX-License-Identifier: Apache-2.0
"""Which group, and how many siblings, a request of an agent loop is sent with; nothing is started."""

from __future__ import annotations

import asyncio
from types import SimpleNamespace
from typing import Any

import pytest

pytest.importorskip("verl")

from seer.integrations.verl.agent_loops import SeerAgentLoopWorkerTQ, _WorkerTQ
from seer.integrations.verl.client import CURRENT, Member

N, VALIDATION_N = 8, 2


@pytest.fixture
def seen(monkeypatch: pytest.MonkeyPatch) -> list[Member | None]:
    """What verl's own agent loops see, in place of running."""
    found: list[Member | None] = []

    async def run_agent_loop(self: Any, sampling_params: Any, trajectory: Any, **kwargs: Any) -> None:
        found.append(CURRENT.get())

    async def run_prompt(self: Any, prompt: Any, sampling_params: Any, trajectory: Any) -> None:
        num = prompt.pop("__rollout_n__", 1)
        for _ in range(num):
            await asyncio.create_task(self._run_agent_loop(sampling_params, trajectory, **prompt))

    monkeypatch.setattr(_WorkerTQ, "_run_agent_loop", run_agent_loop)
    monkeypatch.setattr(_WorkerTQ, "_run_prompt", run_prompt)
    return found


def run_prompt(prompt: dict[str, Any], *, is_validation: bool = False) -> None:
    worker = object.__new__(SeerAgentLoopWorkerTQ)
    rollout = SimpleNamespace(n=N, val_kwargs=SimpleNamespace(n=VALIDATION_N))
    worker.config = SimpleNamespace(actor_rollout_ref=SimpleNamespace(rollout=rollout))
    asyncio.run(worker._run_prompt(prompt, {}, trajectory={"validate": is_validation}))


def test_a_prompt_may_have_a_number_of_responses_of_its_own(seen: list[Member | None]) -> None:
    run_prompt({"uid": "a", "__rollout_n__": 3})
    assert seen == [Member("a", 3)] * 3


@pytest.mark.parametrize(("is_validation", "num_siblings"), [(False, N), (True, VALIDATION_N)])
def test_others_have_the_number_of_training_or_validation(
    seen: list[Member | None], is_validation: bool, num_siblings: int
) -> None:
    run_prompt({"uid": "a"}, is_validation=is_validation)
    assert seen == [Member("a", num_siblings)]
