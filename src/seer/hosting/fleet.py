# SPDX-License-Identifier: Apache-2.0
"""The instances of a rollout and what they share: processes, supervisor, pool, draft server.

Lives as long as the user's `Rollout`; the rollout loops of successive runs are attached to it one at a time.

Invariants
  1. At most one loop is attached. Outputs and losses go to that loop, and are dropped while there is none.
  2. An attached loop knows every instance that is down.
  3. After `close` no process, socket or shared memory of this fleet is left, except a Mooncake store it joined. The
     same holds after a start that failed or was cancelled, and when the interpreter exits without `close`.
"""

from __future__ import annotations

import asyncio
import atexit
import logging
import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, TypeGuard

from seer.config import HostingConfig
from seer.engine.base import Weights
from seer.engine.gpu_handles import are_on_gpu
from seer.engine.instance_settings import InstanceSettings
from seer.engine.prepare import InstanceSpec, PreparedEngine
from seer.engine.profiles import find_profile
from seer.engine.staged_weights import (
    StagedWeights,
    has_shared_memory,
    make_shared_folder,
    remove_orphaned_folders,
    remove_shared_folder,
    stage_in_place,
    stage_in_thread,
)
from seer.errors import ConfigError, DeadlineExceeded, InstanceError, NoProbability, SeerError
from seer.hosting import ProcessInstance, Supervisor
from seer.hosting.configuring import send_to_all
from seer.hosting.devices import InstanceDevices, assign_devices, devices_on_nodes
from seer.hosting.draft_servers import DraftServers, num_draft_servers
from seer.hosting.fleet_pool import FleetPool
from seer.hosting.health import InstanceStatus
from seer.hosting.hostings import make_hosting
from seer.hosting.loop_slot import InstanceListener, LoopSlot
from seer.hosting.memory_limits import refuse_more_than_fit
from seer.hosting.messages import BeginRun, Command, UpdateWeights
from seer.hosting.rank_group import rank_groups
from seer.hosting.resizing import (
    refuse_lost,
    refuse_other_blocks,
    refuse_part_of_ranks,
    refuse_removal,
    start_all,
)
from seer.metrics.events import EventSink
from seer.types import ChunkOutput, DraftMode, InstanceLimits

log = logging.getLogger(__name__)

LEAVE_DEADLINE_S = 120.0
"""For the requests of an instance that leaves: each is parked at its next step. Then it is ended with what it runs."""


class HostedFleet:
    """N instances of one engine, each in its own process, on this machine or on the nodes of a cluster."""

    def __init__(
        self,
        engine: PreparedEngine,
        num_instances: int,
        *,
        options: HostingConfig,
        pool: FleetPool | None = None,
        drafts: bool = False,
    ) -> None:
        self._options = options
        self._engine = engine
        self._num_instances = num_instances
        self.pool = pool
        """The KV pool that the instances share."""
        self._hosting = make_hosting(replace(engine.config, hosting=options), pool)
        self._wants_drafts = drafts and engine.can_draft
        self.draft_servers: DraftServers | None = None
        self._supervisor = Supervisor(
            max_restarts=options.max_restarts,
            restart_pause_s=options.restart_pause_s,
            lost=self._lost,
            back=self._back,
            given_up=self._give_up,
        )
        self._slot = LoopSlot()
        self._failure: SeerError | None = None
        self._chunk_ended = asyncio.Event()
        self._instance_returned = asyncio.Event()
        self._staged = StagedWeights(Path())
        self._matrices: Path | None = None
        self.instances: list[ProcessInstance] = []
        self.devices: list[InstanceDevices] = []
        """Of each instance; known once the fleet starts."""
        self._engines = [engine] * num_instances
        self._retired: set[int] = set()
        self._resizing = asyncio.Lock()
        self._adding: set[asyncio.Task[list[int]]] = set()
        self._configuring = asyncio.Lock()
        """A new instance gets all commands, or joins before one is sent to all."""
        self.weights_version = 0
        self.num_lost = 0
        """Instances lost so far; one that was lost twice counts twice."""
        self._pid = os.getpid()

    async def start(self) -> None:
        """Launch every instance at once and wait until all are ready; none is left if one fails."""
        atexit.register(self._abandon)
        try:
            await self._start()
        except BaseException:
            self.kill()
            await self.close()
            raise

    async def _start(self) -> None:
        is_local = self._hosting.is_local
        self.devices = self._new_devices(self._engine, self._num_instances)
        await self._hosting.start()
        if self.pool is not None:
            self.pool.start()
        if self._wants_drafts:
            options, num_servers = self._options, num_draft_servers(self._num_instances)
            self.draft_servers = DraftServers(
                num_servers,
                host=self._hosting.host,
                max_restarts=options.max_restarts,
                restart_pause_s=options.restart_pause_s,
            )
            await self.draft_servers.start()
        if is_local and self._engine.shares_matrices and self._num_instances > 1 and has_shared_memory():
            self._matrices = make_shared_folder("seer-matrices", 0)
        self.instances = self._new_instances(0, self._engine, self.devices)
        self._supervisor.watch(self.instances)
        await start_all(self.instances, self._take_output)

    def _new_instances(
        self, first: int, engine: PreparedEngine, devices: Sequence[InstanceDevices]
    ) -> list[ProcessInstance]:
        """Instances with the ids from `first` on; nothing is started."""
        spec, size = self._spec(engine), engine.config.data_parallel
        groups = rank_groups(first, len(devices), size, start_deadline_s=self._options.start_deadline_s)
        return [
            ProcessInstance(
                first + i,
                spec,
                options=self._options,
                devices=own,
                launcher=self._hosting.launcher,
                ranks=ranks,
                events=self._slot.take_event,
                on_lost=self._on_lost,
                on_fatal=self._give_up,
            )
            for i, (own, ranks) in enumerate(zip(devices, groups, strict=True))
        ]

    async def add_instances(self, num_instances: int, engine: PreparedEngine | None = None) -> list[int]:
        """Start more instances while a loop may run; returns their ids. All take work once the last one is ready.

        If one of them fails to start, or is lost before the last one is ready, none is added. `engine` is the fleet's
        model, set otherwise for these instances. `close` ends the start of those that are not there yet.
        """
        adding = asyncio.create_task(self._add_instances(num_instances, engine or self._engine))
        self._adding.add(adding)
        adding.add_done_callback(self._adding.discard)
        try:
            return await adding
        except asyncio.CancelledError:
            this = asyncio.current_task()
            if this is not None and this.cancelling():
                raise
            raise InstanceError(f"the fleet was closed while {num_instances} more instances started") from None

    async def _add_instances(self, num_instances: int, engine: PreparedEngine) -> list[int]:
        refuse_part_of_ranks(num_instances, num_together=engine.config.data_parallel)
        async with self._resizing:
            refuse_more_than_fit(engine, num_instances, beside=[self._engines[id] for id in self._present()])
            devices = self._new_devices(engine, num_instances)
            new = self._new_instances(len(self.instances), engine, devices)
            try:
                await start_all(new, self._take_output)
                refuse_other_blocks(new, self.instances[0])
                async with self._configuring:
                    await asyncio.gather(*(one.take_configuration_of(self.instances[0]) for one in new))
                    refuse_lost(new)
                    self.instances += new
                    self.devices += devices
                    self._engines += [engine] * num_instances
                    self._recover()
                    self._supervisor.joined()
            except BaseException:
                await asyncio.gather(*(one.close() for one in new))
                raise
        for one in new:
            if self._slot.loop is not None:
                self._slot.loop.add_instance(one)
        return [one.id for one in new]

    async def remove_instances(self, ids: Sequence[int]) -> None:
        """End instances while a loop may run: their requests are parked and go on elsewhere. Ids are not used again."""
        async with self._resizing:
            refuse_removal(ids, self._present(), num_together=self._engine.config.data_parallel)
            self._retired.update(ids)
            for id in ids:
                self._supervisor.release(id)
                if self._slot.loop is not None:
                    self._slot.loop.retire_instance(id)
            self._instance_returned.set()  # nothing waits for these any more
            leaving = [self.instances[id] for id in ids]
            try:
                await self._wait_until_idle(leaving, "waiting for requests of instances that leave", LEAVE_DEADLINE_S)
            except DeadlineExceeded as error:
                log.warning("%s: they go on elsewhere, and their KV is computed again", error)
            finally:  # also if the caller has given up: these are not used again
                await self._supervisor.released()
                await asyncio.gather(*(one.close() for one in leaving))
                self._supervisor.left()

    def _present(self) -> list[int]:
        return [one.id for one in self.instances if one.id not in self._retired]

    def _new_devices(self, engine: PreparedEngine, num_instances: int) -> list[InstanceDevices]:
        if not self._hosting.is_local:
            return [devices_on_nodes(engine.config)] * num_instances
        config = replace(engine.config, instances=num_instances, hosting=self._options)
        return assign_devices(config, [self.devices[id] for id in self._present()])

    @property
    def limits(self) -> list[InstanceLimits]:
        """Of each instance that was not removed."""
        return [one.limits for one in self.instances if one.id not in self._retired]

    def view(self) -> list[InstanceStatus]:
        """The state of every instance now."""
        return [instance.status() for instance in self.instances]

    def attach(
        self,
        loop: InstanceListener,
        *,
        events: EventSink,
        on_output: Callable[[ChunkOutput], None],
        on_failure: Callable[[SeerError], None],
    ) -> None:
        """Serve this loop from now on; `on_failure` is called when no instance is left or the model is broken."""
        if self._failure is not None:
            raise self._failure
        self._slot.attach(loop, events, on_output, on_failure)
        for instance in self.instances:
            if instance.id in self._retired:
                loop.retire_instance(instance.id)
            elif not instance.is_up:
                loop.lose_instance(instance.id)

    @property
    def is_attached(self) -> bool:
        """Whether it serves a loop."""
        return self._slot.loop is not None

    def detach(self) -> None:
        """The loop has ended; drop outputs until the next one."""
        self._slot.detach()

    async def begin_run(self, run: str, drafts: DraftMode, past: Mapping[int, Sequence[Sequence[int]]]) -> None:
        """Start drafting for a new run; what earlier runs generated is forgotten, and their KV is freed.

        `past` holds responses of an earlier epoch by group: drafts come from them until the group has its own.
        """
        await self._hosting.tidy()
        if self._engine.can_draft:
            await self._configure(BeginRun(run, drafts, self.weights_version, past))

    def end_group(self, group: int) -> None:
        """A group has ended: instances and draft servers forget its tokens, which no sibling will draft from."""
        if self._engine.can_draft:
            for instance in self.instances:
                instance.end_group(group)

    async def update_weights(self, weights: Weights) -> int:
        """Move every instance to the next weights version and return it. Tensors are written once for all instances."""
        weights_version = self.weights_version + 1
        staged = stage_in_place(weights) if self._stay_in_place(weights) else await stage_in_thread(weights)
        try:
            await self._configure(UpdateWeights(str(staged.path), weights_version, staged.home is not None))
        except BaseException:
            staged.discard()
            raise
        self._staged.discard()
        self._staged = staged
        if self.pool is not None:
            self.pool.drop_weights_version(self.weights_version)
        self.weights_version = weights_version
        return weights_version

    def _stay_in_place(self, weights: Weights) -> TypeGuard[Mapping[str, Any]]:
        """Whether every instance sees the GPU that the weights are on, and no other: it can then map them."""
        can_stay = self._hosting.is_local and self._engine.opens_gpu_handles and self._options.weights_in_place
        if not (can_stay and are_on_gpu(weights)):
            return False
        assert isinstance(weights, Mapping), "these are tensors by name"
        gpus = {tensor.device.index for tensor in weights.values()}
        return all(set(devices.gpus) == gpus for devices in self.devices)

    @property
    def weights(self) -> Path | None:
        """Where the newest weights can be read; None for the weights of the model's folder."""
        return self._staged.path if self.weights_version else None

    async def wait_until_idle(self, deadline_s: float) -> None:
        """Wait until no instance runs a chunk, so that a new loop gets no outputs of an earlier one."""
        await self._wait_until_idle(self.instances, "waiting for the last chunks of an earlier run", deadline_s)

    async def _wait_until_idle(self, instances: Sequence[ProcessInstance], why: str, deadline_s: float) -> None:
        try:
            async with asyncio.timeout(deadline_s):
                while any(instance.num_in_flight for instance in instances if instance.is_up):
                    self._chunk_ended.clear()
                    await self._chunk_ended.wait()
        except TimeoutError:
            raise DeadlineExceeded(why, deadline_s) from None

    async def wait_until_up(self) -> None:
        """Wait until every instance that was not removed is up; the caller sets the deadline."""
        while not all(instance.is_up or instance.id in self._retired for instance in self.instances):
            self._instance_returned.clear()
            await self._instance_returned.wait()

    def kill(self) -> None:
        """Kill every process now and restart none. `close` then waits for nothing that hangs."""
        self._supervisor.stop()
        self._stop_adding()
        for instance in self.instances:
            instance.kill()
        if self.draft_servers is not None:
            self.draft_servers.kill()

    async def close(self) -> None:
        """End every process and free the shared memory."""
        await self._supervisor.close()
        await asyncio.gather(*self._stop_adding(), return_exceptions=True)
        await asyncio.gather(*(instance.close() for instance in self.instances))
        if self.draft_servers is not None:
            await self.draft_servers.close()
        await self._hosting.close()
        self._free_memory()
        atexit.unregister(self._abandon)

    def _stop_adding(self) -> list[asyncio.Task[list[int]]]:
        """Give up the instances that are being added; returns what ends their processes."""
        for adding in self._adding:
            adding.cancel()
        return list(self._adding)

    def _abandon(self) -> None:
        """At the interpreter's exit: do what `close` has not done, without an event loop."""
        if os.getpid() == self._pid:  # a forked child shares the processes and the memory, and must leave them
            for instance in self.instances:
                instance.kill()
            self._free_memory()

    def _free_memory(self) -> None:
        remove_orphaned_folders()  # of instances that were killed
        self._staged.discard()
        if self._matrices is not None:
            remove_shared_folder(self._matrices)
        if self.pool is not None:
            self.pool.close()

    def _spec(self, engine: PreparedEngine) -> InstanceSpec:
        servers, config = self.draft_servers, engine.config
        profile = find_profile(config) if servers is not None and self._hosting.is_local else None
        settings = InstanceSettings(
            # An instance's process sees its own GPUs alone, so its first is `cuda`.
            config=config if config.on_cpu else replace(config, device="cuda"),
            pool=self.pool.settings if self.pool is not None and self._fits_pool(engine) else None,
            draft_servers=servers.addresses if servers is not None else None,
            draft_keys=servers.client_keys if servers is not None else None,
            step_profile=str(profile) if profile is not None else None,
            matrices_dir=str(self._matrices) if self._matrices is not None else None,
        )
        return InstanceSpec(factory=self._engine.factory, settings=settings)

    def _fits_pool(self, engine: PreparedEngine) -> bool:
        """Whether the pool, which was made for the first instances, takes the blocks of these."""
        most, own = self._engine.block_bytes or 0, engine.block_bytes or 0
        if own > most:
            log.warning(
                "instances with tensor_parallel=%d have KV blocks of %d bytes, the pool takes %d: requests that come "
                "from them or go to them are computed again",
                engine.config.tensor_parallel,
                own,
                most,
            )
        return own <= most

    async def _configure(self, command: Command) -> None:
        """Send a command to every instance: now if it is up, otherwise after its restart."""
        async with self._configuring:
            await send_to_all(self.instances, command)

    def _take_output(self, output: ChunkOutput) -> None:
        if output.end is not None:
            self._chunk_ended.set()
        self._slot.take_output(output)

    def _on_lost(self, instance: int, reason: str) -> None:
        if instance < len(self.instances):  # `add_instances` sees to those that are not in the fleet yet
            self._supervisor.on_lost(instance, reason)

    def _lost(self, instance: int, reason: str) -> None:
        self.num_lost += 1
        log.warning("instance %d was lost: %s", instance, reason)
        self._slot.lose(instance)

    def _back(self, instance: int) -> None:
        log.warning("instance %d was restarted", instance)
        self._recover()
        self._instance_returned.set()
        if self._slot.loop is None:
            return
        try:
            self._slot.loop.rejoin_instance(instance)
        except ConfigError as error:  # where it now runs its blocks have another size
            self.instances[instance].give_up(str(error))

    def _recover(self) -> None:
        """An instance is up that was not."""
        if not isinstance(self._failure, NoProbability):  # that one is the model's, and stays
            self._failure = None

    def _give_up(self, error: SeerError) -> None:
        if self._failure is not None:
            return  # the first failure says why
        self._failure = error
        self._slot.fail(error)
