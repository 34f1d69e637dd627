# SPDX-License-Identifier: Apache-2.0
"""A replica of verl whose servers are Seer's: starts them, tells the driver of them, and restarts those that died.

verl makes its replicas in the trainer's process. The first one starts the driver. verl puts all replicas to sleep after
each rollout, before it sends the next weights: at that moment a server that died is started again, so it has the newest
weights before the next rollout. It is also the moment before the training: a rollout that lost a response ends it.

Waits for                                    unblocked by
  a server's answer, before it sleeps          the server, its death, ANSWER_DEADLINE_S
  a new server                                 the server, its death, start_deadline_s
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
from pathlib import Path
from typing import Any

import ray
from omegaconf import DictConfig, open_dict
from verl.utils.import_utils import load_class_from_fqn
from verl.workers.rollout.vllm_rollout.vllm_async_server import vLLMReplica

from seer.errors import ConfigError, DeadlineExceeded, InstanceError
from seer.integrations.verl.agent_loops import (
    MANAGER,
    SeerAgentLoopManager,
    SeerAgentLoopManagerTQ,
    SeerAgentLoops,
)
from seer.integrations.verl.driver import SeerDriver
from seer.integrations.verl.driver_name import DRIVER
from seer.integrations.verl.environment_setup import use_environment
from seer.integrations.verl.server import SeerHttpServer
from seer.integrations.verl.settings import VerlSettings, read_settings

log = logging.getLogger(__name__)

MAX_REQUESTS = 1_000_000
"""Calls that the driver holds at once: every request of a rollout is one."""
ANSWER_DEADLINE_S = 60.0
"""A server that does not answer for this long has hung, and is killed."""
MAX_SLEEPS = 3
"""A server that dies more often at once has a cause that starting it again does not mend."""
SETTING = "actor_rollout_ref.rollout.agent.agent_loop_manager_class"


class SeerReplica(vLLMReplica):
    """`vLLMReplica` with Seer's server class."""

    servers: list[Any]

    def __init__(self, replica_rank: int, config: Any, model_config: Any, *args: Any, **kwargs: Any) -> None:
        run_dir = _use_agent_loops(config)
        self._chat = use_environment(config, model_config)
        super().__init__(replica_rank, config, model_config, *args, **kwargs)
        if self.is_reward_model or self.is_teacher_model:
            raise ConfigError("rollout.name=seer is for the policy alone", hint="reward and teacher models: name=vllm")
        refuse_several_machines(self.nnodes, self.world_size, self.gpus_per_node)
        self._run_dir = str(Path(run_dir).absolute())
        self._seer: VerlSettings = read_settings(self.config.custom)
        self.server_class = ray.remote(SeerHttpServer)
        self._num_replicas = max(1, self.config.nnodes * self.config.n_gpus_per_node // self.world_size)
        self._driver: Any = None

    async def init_hybrid(self, worker_group: Any) -> None:
        """Beside the ranks of the trainer, one replica for each group of them."""
        self._num_replicas = worker_group.world_size // self.world_size
        await super().init_hybrid(worker_group)

    async def launch_servers(self) -> None:
        """Start the servers, then tell the driver."""
        self._driver = self._driver or await self._start_driver()
        await super().launch_servers()
        node, _ = await self._place_of(self.servers[0])
        await self._driver.add_server.remote(self.replica_rank, self.servers[0], node)

    async def sleep(self) -> None:
        """Sleep; a server that died is started again first. So is one that dies now, a few times.

        Raises if the rollout lost a response, or the driver is dead: verl would train on what is left of the groups.
        """
        if self._driver is not None:
            await self._driver.check_rollout.remote()
        for _ in range(MAX_SLEEPS):
            await self._restart_dead()
            try:
                await super().sleep()
            except ray.exceptions.RayActorError as error:
                log.warning("replica %d: a server died on its way to sleep: %r", self.replica_rank, error)
            else:
                return
        raise InstanceError(f"rollout server {self.replica_rank} died {MAX_SLEEPS} times on its way to sleep")

    def _get_server_name_prefix(self) -> str:
        return "seer_"

    async def _start_driver(self) -> Any:
        """The driver of this job, started beside the first rank of the trainer."""
        node, address = await self._place_of(self.workers[0])
        near = ray.util.scheduling_strategies.NodeAffinitySchedulingStrategy(node_id=node, soft=False)
        return (
            ray.remote(SeerDriver)
            .options(
                name=DRIVER, get_if_exists=True, num_cpus=0, max_concurrency=MAX_REQUESTS, scheduling_strategy=near
            )
            .remote(
                self._seer,
                num_servers=self._num_replicas,
                node=node,
                address=address,
                num_machines=_num_machines(),
                run_dir=self._run_dir,
                model=str(self.model_config.path),
                seed=self.config.seed,
                response_tokens=self.config.response_length,
                chat=self._chat,
            )
        )

    @staticmethod
    async def _place_of(actor: Any) -> tuple[str, str]:
        """Ray's name of an actor's machine, and its address."""
        found: tuple[str, str] = await actor.__ray_call__.remote(_place)
        return found

    async def _restart_dead(self) -> None:
        answers = await asyncio.gather(*map(_address_of, self.servers), return_exceptions=True)
        dead = [answer for answer in answers if isinstance(answer, ray.exceptions.RayActorError | TimeoutError)]
        if not dead:
            return
        log.warning("replica %d: a server has died and is started again: %r", self.replica_rank, dead[0])
        for server in self.servers:
            with contextlib.suppress(Exception):
                ray.kill(server)
        self.servers = []
        try:
            async with asyncio.timeout(self._seer.start_deadline_s):
                await self.launch_servers()
        except TimeoutError:
            what = f"the restart of rollout server {self.replica_rank}"
            raise DeadlineExceeded(what, self._seer.start_deadline_s) from None


async def _address_of(server: Any) -> Any:
    """Any answer that takes no time."""
    async with asyncio.timeout(ANSWER_DEADLINE_S):
        return await server.get_server_address.remote()


def _place(_: Any) -> tuple[str, str]:
    util: Any = ray.util
    return ray.get_runtime_context().get_node_id(), util.get_node_ip_address().strip("[]")


def _num_machines() -> int:
    cluster: Any = ray
    return sum(node["Alive"] for node in cluster.nodes())


def _use_agent_loops(config: Any) -> str:
    """Have verl's trainer use our agent-loop manager; returns the folder to record the run in.

    `config` is the rollout's part of the whole configuration. The trainer reads this setting after its replicas have
    started; verl's older trainer has read it before.
    """
    if not isinstance(config, DictConfig) or not config.get("agent"):
        return "seer"
    trainer = config._get_root().get("trainer") or {}
    is_older = not trainer.get("use_v1", True)
    if not is_older:
        _refuse_asynchronous((trainer.get("v1") or {}).get("trainer_mode", "sync"))
    chosen = config.agent.get("agent_loop_manager_class")
    if chosen is not None:
        _refuse_foreign(chosen)
    else:
        if is_older:
            raise ConfigError(f"{SETTING} is not set", hint=f"trainer.use_v1=True, or +{SETTING}={MANAGER}")
        with open_dict(config):
            config.agent.agent_loop_manager_class = MANAGER
    return f"{trainer.get('default_local_dir', '.')}/seer"


def refuse_several_machines(num_machines: int, num_gpus: int, gpus_per_machine: int) -> None:
    """Of one replica: verl starts vLLM's later nodes with arguments of its own, so their workers would not be ours."""
    if num_machines > 1:
        raise ConfigError(
            f"a replica of {num_gpus} GPUs spans {num_machines} machines of {gpus_per_machine}; "
            "rollout.name=seer supports one",
            hint=f"tensor_model_parallel_size of at most {gpus_per_machine}, or rollout.name=vllm",
        )


def _refuse_foreign(manager: str) -> None:
    """A manager that does not ask the driver would go to verl's servers past Seer."""
    found = load_class_from_fqn(manager, "agent-loop manager")
    if not issubclass(found, SeerAgentLoops | SeerAgentLoopManager | SeerAgentLoopManagerTQ):
        raise ConfigError(
            f"{SETTING}={manager} does not ask Seer's driver for responses",
            hint=f"leave it out, use {MANAGER}, or derive from SeerAgentLoopManagerTQ of the same module",
        )


def _refuse_asynchronous(mode: str) -> None:
    """Weights of those trainers change in the middle of responses; ours have one version from end to end."""
    if mode != "sync":
        raise ConfigError(
            f"trainer.v1.trainer_mode={mode} is not supported with rollout.name=seer, which is synchronous",
            hint="trainer.v1.trainer_mode=sync, or rollout.name=vllm",
        )
