# SPDX-License-Identifier: Apache-2.0
"""Whole rollouts on hosted vLLM instances: tokens, new weights, engines and hosts that are killed.

One rollout runs once; each test checks one part of it. Tokens are compared with the embedded
engine's, which computes the same model in another way.
"""

from __future__ import annotations

import asyncio
import os
import signal
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("torch")

from processes import descendants, gone
from seer import GroupResult, HostingConfig, Rollout, Sampling
from seer.config import VllmEngineConfig, VllmSpeculation
from seer.engine.local.models_get import find_model
from seer.engine.local.tiny import make_tiny_model
from seer.errors import InputError
from seer.metrics.events import Event, Stopped
from vllm_engines import HEAD_DIM, named_segments, needs_vllm

pytestmark = needs_vllm

PROMPTS = [[3 + i, 7, 11, 5 + i, 9, *range(20, 50)] for i in range(4)]
SAMPLING = Sampling(max_tokens=96, temperature=0.0, ignore_eos=True)
Tokens = dict[tuple[int, int], list[int]]


class KillEngine:
    """Kills the engine process below an instance's host, once, when a chunk of it ends while others run."""

    def __init__(self, host: int, instance: int) -> None:
        self._host, self._instance = host, instance
        self.killed: int | None = None

    def __call__(self, event: Event) -> None:
        if isinstance(event, Stopped) and event.instance == self._instance and self.killed is None:
            (self.killed,) = (pid for pid in descendants(self._host) if "EngineCore" in _title(pid))
            os.kill(self.killed, signal.SIGKILL)


def _title(pid: int) -> str:
    return Path(f"/proc/{pid}/cmdline").read_text()


def tokens_of(groups: list[GroupResult]) -> Tokens:
    return {(r.group, r.index): r.token_ids for group in groups for r in group.responses}


async def rolled_out(rollout: Rollout, **settings: Any) -> list[GroupResult]:
    return [group async for group in rollout.run(PROMPTS, n=3, sampling=SAMPLING, **settings)]


def by_the_local_engine(model: Path) -> Tokens:
    async def scenario() -> Tokens:
        async with Rollout(model, kv_blocks=512, speculation="off", hosting=HostingConfig(pin_cores=False)) as rollout:
            return tokens_of(await rolled_out(rollout))

    return asyncio.run(scenario())


@dataclass
class Story:
    """The results of the rollout."""

    model: Path
    other: Path
    first: list[GroupResult] = field(default_factory=list)
    all_at_once: list[GroupResult] = field(default_factory=list)
    preemptions: dict[str, int] = field(default_factory=dict)
    updated: list[GroupResult] = field(default_factory=list)
    killed: list[GroupResult] = field(default_factory=list)
    num_lost: int = 0
    segments_with_names: list[str] = field(default_factory=list)
    engine_was_killed: bool = False
    rest_of_the_lost_ended: bool = False
    engine_followed_its_host: bool = False


@pytest.fixture(scope="module")
def story(tmp_path_factory: pytest.TempPathFactory) -> Story:
    home = tmp_path_factory.mktemp("rollout")
    story = Story(
        make_tiny_model(home / "tiny", head_dim=HEAD_DIM), make_tiny_model(home / "other", head_dim=HEAD_DIM, seed=5)
    )

    async def tell() -> None:
        rollout = Rollout(
            story.model,
            engine="vllm",
            instances=2,
            chunk_tokens=24,
            kv_blocks=20,  # of 32 tokens: too few for six whole requests, which need up to five each
            max_num_seqs=6,
            pool_bytes=16 << 20,
            engine_settings=VllmEngineConfig(speculation=VllmSpeculation()),  # a small model has no drafts otherwise
            hosting=HostingConfig(pin_cores=False, max_restarts=0, log_dir=home / "logs"),
        )
        async with rollout:
            story.first = await rolled_out(rollout)
            assert rollout.summary is not None
            story.preemptions["seer"] = rollout.summary.preemptions
            story.all_at_once = await rolled_out(rollout, scheduler="verl-sync")
            story.preemptions["verl-sync"] = rollout.summary.preemptions
            await rollout.update_weights(story.other)
            story.updated = await rolled_out(rollout)
            host = rollout.fleet.instances[1].pid
            assert host is not None
            everything = descendants(host)
            story.segments_with_names = named_segments(everything)
            kill = KillEngine(host, 1)
            story.killed = await rolled_out(rollout, events=kill)
            story.engine_was_killed = kill.killed is not None
            story.num_lost = rollout.fleet.num_lost
            story.rest_of_the_lost_ended = await gone([host, *everything])
            survivor = rollout.fleet.instances[0].pid
            assert survivor is not None
            engine = descendants(survivor)
            assert engine, "the engine is a process below its host"
            os.kill(survivor, signal.SIGKILL)
            story.engine_followed_its_host = await gone(engine)

    asyncio.run(tell())
    return story


def test_a_rollout_has_the_tokens_of_the_local_engine(story: Story) -> None:
    assert tokens_of(story.first) == by_the_local_engine(story.model)
    assert {r.weights_version for g in story.first for r in g.responses} == {0}


def test_requests_beyond_the_memory_are_preempted_and_counted(story: Story) -> None:
    assert story.preemptions["verl-sync"] > 0
    assert story.preemptions["seer"] == 0
    assert tokens_of(story.all_at_once) == tokens_of(story.first)


def test_new_weights_take_effect_in_the_next_weights_version(story: Story) -> None:
    assert tokens_of(story.updated) == by_the_local_engine(story.other)
    assert {r.weights_version for g in story.updated for r in g.responses} == {1}


def test_requests_of_a_killed_engine_finish_on_others_with_nothing_lost_or_doubled(story: Story) -> None:
    assert story.engine_was_killed
    assert story.num_lost == 1
    assert tokens_of(story.killed) == by_the_local_engine(story.other)


def test_nothing_of_a_lost_instance_is_left(story: Story) -> None:
    assert story.rest_of_the_lost_ended
    assert story.segments_with_names == [], "memory with a name stays when its processes are killed"


def test_an_engine_ends_with_its_host(story: Story) -> None:
    assert story.engine_followed_its_host


def test_a_real_model_has_the_tokens_of_the_local_engine() -> None:
    try:
        model = find_model("smollm2")
    except InputError:
        pytest.skip("needs `seer model get smollm2`")
    sampling = Sampling(max_tokens=24, temperature=0.0)

    async def answers(engine: str) -> list[list[int]]:
        settings: dict[str, Any] = {"engine": engine, "max_model_len": 512, "max_num_seqs": 4}
        async with Rollout(model, **settings, hosting=HostingConfig(pin_cores=False)) as rollout:
            prompt = [{"role": "user", "content": "Count from one to ten."}]
            return [r.token_ids async for g in rollout.run([prompt], n=2, sampling=sampling) for r in g.responses]

    assert asyncio.run(answers("vllm")) == asyncio.run(answers("local"))
