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
SAMPLING = Sampling(max_tokens=480, ignore_eos=True)
DEADLINE_S = 200.0
MOST_ROUNDS = 8
"""Where drafting did not seem to pay, it is tried again within so many steps. And a sibling's first drafts may be made
before the others' tokens have come from the server."""
RIGHT, WRONG = 0.7, 0.3
"""Shares of drafts that were accepted: more than the first with such a sibling, less than the second without."""


class Acceptance:
    """Drafts of one instance, from its reports."""

    def __init__(self, instance: int) -> None:
        self._instance = instance
        self._reports: list[Stepped] = []

    def __call__(self, event: Event) -> None:
        if isinstance(event, Stepped) and event.instance == self._instance:
            self._reports.append(event)

    def take(self) -> float | None:
        """The share that was accepted in the second half of the steps since the last call; None if nothing was drafted
        there. In the first the others' tokens may be on their way.
        """
        num_left = sum(report.num_steps for report in self._reports) / 2
        num_drafted = num_accepted = 0
        while self._reports and num_left > 0:
            report = self._reports.pop()
            num_left -= report.num_steps
            num_drafted += report.num_drafted
            num_accepted += report.num_accepted
        self._reports.clear()
        return num_accepted / num_drafted if num_drafted else None


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


async def best_of_siblings(session: Session, far: Acceptance, name: str) -> tuple[Groups, float]:
    """Groups with a member here, and then one on the other node, which drafts; and the largest share of its drafts that
    was accepted in a round.
    """
    best: float | None = None
    for number in range(MOST_ROUNDS):
        groups = Groups(session, f"{name} {number}")
        tokens = await groups.member(HERE)
        assert await groups.member(FAR) == tokens
        best = max((one for one in (best, far.take()) if one is not None), default=None)
        if best is not None and best > RIGHT:
            break
    assert best is not None, "nothing was drafted"
    return groups, best


async def best_of_more(groups: Groups, far: Acceptance) -> float:
    """Other members on the other node, which draft; as above."""
    best = 0.0
    for _ in range(MOST_ROUNDS):
        await groups.member(FAR)
        best = max(best, far.take() or 0.0)
        if best > RIGHT:
            break
    return best


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
                _, known = await best_of_siblings(session, far, "known")
                assert known > RIGHT, "drafts did not come from the siblings on the other node"
                assert min(status.tokens for status in await sizes(rollout)) > 0, "groups are spread over both servers"
                for relay in relays:
                    relay.close()
                groups, unknown = await best_of_siblings(session, far, "unknown")
                assert unknown < WRONG, "random weights repeat themselves: the test shows nothing"
                more = await best_of_more(groups, far)
                assert more > RIGHT, "drafts did not come from the siblings on the same node"
                assert rollout.fleet.num_lost == 0

    with two_nodes() as cluster:
        asyncio.run(scenario(cluster.address))
    assert len(relays) == 2
