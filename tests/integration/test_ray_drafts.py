# SPDX-License-Identifier: Apache-2.0
"""Siblings on two nodes of a Ray cluster draft for each other through the draft service, and a node that is cut off
from it drafts from what it has.

Members of a group get the same seed here, so they generate the same tokens. Random weights repeat little else: drafts
are right where such a sibling is known, and mostly wrong where it is not.
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("torch")
pytest.importorskip("ray")

from draft_servers import server_status
from ray_clusters import two_nodes
from seer import HostingConfig, Rollout, Sampling
from seer.drafting.wire import Status
from seer.engine.instance_settings import InstanceSettings
from seer.engine.local.tiny import make_tiny_model
from seer.engine.prepare import InstanceSpec
from seer.hosting import draft_servers
from seer.hosting.launcher import Child
from seer.hosting.ray.launcher import RayLauncher
from seer.metrics.events import Event, Stepped
from seer.runs.session import Session
from seer.scheduling import leases
from seer.scheduling.seer import EarliestFinishPlacement
from tcp_relay import TcpRelay

HERE, FAR = 0, 1
"""The two instances. What lies between the second and the draft servers can be cut."""
NUM_GROUPS = 16
"""On one of two servers all of them would be in one of 32,768 runs."""
SAMPLING = Sampling(max_tokens=160, ignore_eos=True)
DEADLINE_S = 200.0
MOST_ROUNDS = 4
"""Where drafting did not seem to pay, it is tried again within so many steps."""


class Acceptance:
    """Drafts of one instance, from its reports."""

    def __init__(self, instance: int) -> None:
        self.num_drafted = self.num_accepted = 0
        self._instance = instance

    def __call__(self, event: Event) -> None:
        if isinstance(event, Stepped) and event.instance == self._instance:
            self.num_drafted += event.num_drafted
            self.num_accepted += event.num_accepted

    def take(self) -> float:
        """The share that was accepted since the last call."""
        assert self.num_drafted, "nothing was drafted"
        share = self.num_accepted / self.num_drafted
        self.num_drafted = self.num_accepted = 0
        return share


class Groups:
    """Groups of members with the same seed."""

    def __init__(self, session: Session, name: str) -> None:
        self._session, self._name = session, name

    async def member(self, instance: int) -> list[list[int]]:
        """One more member of each group, all on this instance: their tokens."""
        handles = []
        for number in range(NUM_GROUPS):
            prompt = [3, 7, 11, 5 + number]
            handles += self._session.submit(
                prompt, sampling=SAMPLING, seed=number, group=f"{self._name} {number}", home=instance
            )
        tokens = [(await handle).token_ids for handle in handles]
        assert {handle.last_instance for handle in handles} == {instance}
        return tokens


async def siblings(session: Session, far: Acceptance, name: str) -> Groups:
    """Groups with a member here, and then one on the other node, which drafts."""
    for number in range(MOST_ROUNDS):
        groups = Groups(session, f"{name} {number}")
        tokens = await groups.member(HERE)
        assert await groups.member(FAR) == tokens
        if far.num_drafted:
            break
    return groups


async def one_more(groups: Groups, far: Acceptance) -> None:
    """Another member on the other node, which drafts."""
    for _ in range(MOST_ROUNDS):
        await groups.member(FAR)
        if far.num_drafted:
            break


@pytest.fixture
def relays(monkeypatch: pytest.MonkeyPatch) -> list[TcpRelay]:
    """What the second instance reaches the draft servers through."""
    made: list[TcpRelay] = []
    launch = RayLauncher.launch

    async def through_relays(self: RayLauncher, id: int, spec: InstanceSpec, *rest: Any) -> Child:
        if id == FAR:
            assert isinstance(spec.settings, InstanceSettings)
            addresses = []
            for address in spec.settings.draft_servers or ():
                host, _, port = address.removeprefix("tcp://").rpartition(":")
                made.append(TcpRelay(host, int(port)))
                addresses.append(f"tcp://{host}:{made[-1].port}")
            spec = replace(spec, settings=replace(spec.settings, draft_servers=tuple(addresses)))
        return await launch(self, id, spec, *rest)

    monkeypatch.setattr(RayLauncher, "launch", through_relays)
    return made


async def sizes(rollout: Rollout) -> Sequence[Status]:
    servers = rollout.fleet.draft_servers
    assert servers is not None
    return [
        await asyncio.to_thread(server_status, address, servers.client_keys, lambda status: status.tokens > 0)
        for address in servers.addresses
    ]


@pytest.mark.timeout(400)
def test_siblings_on_two_nodes_draft_for_each_other_and_a_node_that_is_cut_off_goes_on(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, relays: list[TcpRelay]
) -> None:
    monkeypatch.setattr(draft_servers, "INSTANCES_PER_SERVER", 1)  # two servers
    # Members stay on the instance that they were asked for.
    monkeypatch.setattr(leases, "UNEVEN_REQUESTS", NUM_GROUPS + 1)
    monkeypatch.setattr(EarliestFinishPlacement, "_candidates", lambda self, request, *_: [request.last_instance])
    model, far = make_tiny_model(tmp_path / "tiny"), Acceptance(FAR)

    async def scenario(address: str) -> None:
        settings: dict[str, Any] = {"instances": 2, "kv_blocks": 2048, "max_num_seqs": 2 * NUM_GROUPS}
        hosting = HostingConfig(pin_cores=False, ray=address, log_dir=tmp_path / "logs")
        async with asyncio.timeout(DEADLINE_S), Rollout(model, hosting=hosting, **settings) as rollout:
            assert len({one.node_name for one in rollout.fleet.instances}) == 2
            async with rollout.session(events=far) as session:
                groups = await siblings(session, far, "known")
                assert far.take() > 0.7, "drafts did not come from the siblings on the other node"
                assert min(status.tokens for status in await sizes(rollout)) > 0, "groups are spread over both servers"
                for relay in relays:
                    relay.close()
                groups = await siblings(session, far, "unknown")
                assert far.take() < 0.3, "random weights repeat themselves: the test shows nothing"
                await one_more(groups, far)
                assert far.take() > 0.7, "drafts did not come from the siblings on the same node"
                assert rollout.fleet.num_lost == 0

    with two_nodes() as cluster:
        asyncio.run(scenario(cluster.address))
    assert len(relays) == 2
