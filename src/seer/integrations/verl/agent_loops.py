# SPDX-License-Identifier: Apache-2.0
"""verl's agent loops as they are, over the driver: every request says which prompt's group it belongs to.

`SeerAgentLoops.create` makes the manager of the trainer in use: verl's v1, over its transfer queue, or the older one.
The replica names this class in verl's settings (replica.py), so users need not.
"""

from __future__ import annotations

from typing import Any

import ray
from verl.experimental.agent_loop import AgentLoopManager, AgentLoopWorker
from verl.trainer.ppo.v1.agent_loop_tq import AgentLoopManagerTQ, AgentLoopWorkerTQ

from seer.integrations.verl import environment_loop  # noqa: F401 - registers it, in every agent-loop worker
from seer.integrations.verl.client import CURRENT, Member, SeerClient
from seer.integrations.verl.driver_name import DRIVER
from seer.integrations.verl.verl_log import add_to_log

MANAGER = f"{__name__}.SeerAgentLoops"
"""For `actor_rollout_ref.rollout.agent.agent_loop_manager_class`."""
_WorkerTQ: Any = AgentLoopWorkerTQ.__ray_metadata__.modified_class


class _WithGroups:
    """Mixed into verl's workers: marks the task of each agent loop."""

    config: Any

    async def _run_agent_loop(self, sampling_params: Any, trajectory: Any, **kwargs: Any) -> Any:
        uid, known = kwargs.get("uid"), CURRENT.get()
        if uid is not None:
            num_siblings = known.num_siblings if known is not None else self._usual_siblings(trajectory["validate"])
            CURRENT.set(Member(str(uid), num_siblings))
        return await super()._run_agent_loop(sampling_params, trajectory, **kwargs)  # type: ignore[misc]

    def _usual_siblings(self, is_validation: bool) -> int:
        rollout = self.config.actor_rollout_ref.rollout
        return int(rollout.val_kwargs.n if is_validation else rollout.n)


class SeerAgentLoopWorker(_WithGroups, AgentLoopWorker):
    """Of verl's older trainer: the samples of a group are rows of a batch."""


class SeerAgentLoopWorkerTQ(_WithGroups, _WorkerTQ):
    """Of verl's v1 trainer: one call per prompt, which may have a number of responses of its own."""

    async def _run_prompt(self, prompt: dict[str, Any], sampling_params: Any, trajectory: Any, **kwargs: Any) -> None:
        own = prompt.get("__rollout_n__")
        if own is not None:
            CURRENT.set(Member(str(prompt["uid"]), int(own)))
        await super()._run_prompt(prompt, sampling_params, trajectory=trajectory, **kwargs)


class SeerAgentLoopManagerTQ(AgentLoopManagerTQ):
    """Tells the driver of every rollout before its prompts go out."""

    def __init__(self, config: Any, llm_client: Any, *args: Any, **kwargs: Any) -> None:
        self._driver = ray.get_actor(DRIVER)
        super().__init__(config, _client(config, llm_client, self._driver), *args, **kwargs)
        self.agent_loop_workers_class = ray.remote(SeerAgentLoopWorkerTQ)
        add_to_log(self._driver)

    def generate_sequences(self, prompts: Any) -> None:
        """Dispatch the prompts; verl collects the responses from its transfer queue."""
        is_validation = bool(prompts["validate"]) if "validate" in prompts else False
        step = _first(prompts["global_steps"])
        ray.get(self._driver.begin_rollout.remote(step, is_validation))
        super().generate_sequences(prompts)


class SeerAgentLoopManager(AgentLoopManager):
    """The same for verl's older trainer."""

    def __init__(self, config: Any, llm_client: Any, *args: Any, **kwargs: Any) -> None:
        self._driver = ray.get_actor(DRIVER)
        self.agent_loop_workers_class = ray.remote(SeerAgentLoopWorker)
        super().__init__(config, _client(config, llm_client, self._driver), *args, **kwargs)
        add_to_log(self._driver)

    def generate_sequences(self, prompts: Any) -> Any:
        """Roll the batch out."""
        meta = prompts.meta_info
        ray.get(self._driver.begin_rollout.remote(int(meta.get("global_steps", 0)), bool(meta.get("validate", False))))
        return super().generate_sequences(prompts)


class SeerAgentLoops:
    """What verl's setting names."""

    @staticmethod
    def create(config: Any, **kwargs: Any) -> Any:
        """The manager of the trainer that asks."""
        kind = SeerAgentLoopManagerTQ if config.transfer_queue.enable else SeerAgentLoopManager
        return kind.create(config=config, **kwargs)


def _client(config: Any, theirs: Any, driver: Any) -> SeerClient:
    return SeerClient(config, driver, theirs._load_balancer)


def _first(steps: Any) -> int:
    """verl gives one number for the whole batch, or one for each prompt, all equal."""
    return int(steps if isinstance(steps, int) else steps[0])
