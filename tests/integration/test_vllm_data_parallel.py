# SPDX-License-Identifier: Apache-2.0
"""Two real vLLM engines share the experts of a mixture of experts: data-parallel attention with expert parallelism.

One rollout lives through everything once, because engines take long to start; each test checks a part of it. Greedy
tokens are compared with those of transformers, which has the whole model in one place.
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
pytest.importorskip("transformers")

import cpu_experts
from expert_models import make_qwen3_moe
from processes import descendants, gone
from seer import GroupResult, HostingConfig, Rollout, Sampling
from seer.config import VllmEngineConfig, VllmSpeculation
from seer.errors import ConfigError
from seer.metrics.events import Event, Prefilling, Started
from vllm_engines import HEAD_DIM, named_segments, needs_vllm

pytestmark = [*needs_vllm, pytest.mark.timeout(900)]  # four starts of an engine with two processes each

PROMPTS = [[3 + i, 7, 11, 5 + i, 9, *range(20, 50)] for i in range(4)]
SAMPLING = Sampling(max_tokens=96, temperature=0.0, ignore_eos=True)
Tokens = dict[tuple[int, int], list[int]]


@dataclass
class Story:
    """What happened."""

    expected: Tokens
    expected_of_other: Tokens
    uneven: Tokens = field(default_factory=dict)
    moved: Tokens = field(default_factory=dict)
    num_moves: int = 0
    num_loaded: int = 0
    num_recomputed: int = 0
    accepted: int = 0
    paused: Tokens = field(default_factory=dict)
    killed: Tokens = field(default_factory=dict)
    lost: list[int] = field(default_factory=list)
    updated: Tokens = field(default_factory=dict)
    segments: list[str] = field(default_factory=list)
    logs: list[str] = field(default_factory=list)
    num_processes: int = 0
    all_ended: bool = False


class Watch:
    """Counts moves and what of their KV was loaded; may kill an instance when it gets its third chunk."""

    def __init__(self, story: Story, *, victim: int | None = None) -> None:
        self._story, self._victim, self._num_chunks = story, victim, 0

    def __call__(self, event: Event) -> None:
        if isinstance(event, Started) and event.moved_from not in (None, event.instance):
            self._story.num_moves += 1
        elif isinstance(event, Prefilling):
            self._story.num_loaded += event.num_loaded
            self._story.num_recomputed += event.num_recomputed
        if isinstance(event, Started) and event.instance == 1:
            self._num_chunks += 1
            if self._victim is not None and self._num_chunks == 3:
                os.kill(self._victim, signal.SIGKILL)


def by_transformers(folder: Path) -> Tokens:
    import torch
    from transformers import AutoModelForCausalLM

    model: Any = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    tokens: Tokens = {}
    for i, prompt in enumerate(PROMPTS):
        out = model.generate(
            torch.tensor([prompt]),
            max_new_tokens=SAMPLING.max_tokens,
            min_new_tokens=SAMPLING.max_tokens,
            do_sample=False,
        )
        tokens |= {(i, index): out[0, len(prompt) :].tolist() for index in range(3)}
    return tokens


def of_the_fleet(rollout: Rollout) -> list[int]:
    """Its processes: the test runner may have others."""
    hosts = [host.pid for host in rollout.fleet.instances if host.pid is not None]
    return [*hosts, *(pid for host in hosts for pid in descendants(host))]


def tokens_of(groups: list[GroupResult]) -> Tokens:
    return {(r.group, r.index): r.token_ids for group in groups for r in group.responses}


@pytest.fixture(scope="module")
def story(tmp_path_factory: pytest.TempPathFactory) -> Story:
    home = tmp_path_factory.mktemp("experts")
    model, other = make_qwen3_moe(home / "tiny"), make_qwen3_moe(home / "other", seed=5)
    story = Story(by_transformers(model), by_transformers(other))
    cpu_experts.install(home)

    async def rolled_out(rollout: Rollout, prompts: list[list[int]], events: Watch) -> Tokens:
        return tokens_of([group async for group in rollout.run(prompts, n=3, sampling=SAMPLING, events=events)])

    async def tell() -> None:
        rollout = Rollout(
            model,
            engine="vllm",
            instances=2,
            data_parallel=2,
            scheduler="seer-paper",
            chunk_tokens=32,
            block_size=32,
            kv_blocks=64,
            max_num_seqs=4,
            max_model_len=200,
            pool_bytes=32 << 20,
            engine_settings=VllmEngineConfig(speculation=VllmSpeculation(fixed_tokens=4)),
            hosting=HostingConfig(pin_cores=False, restart_pause_s=0.0, log_dir=home / "logs"),
        )
        async with rollout:
            hosts = rollout.fleet.instances
            processes = of_the_fleet(rollout)
            story.segments = named_segments(processes)
            # A single response: the other instance has nothing to do, and steps along.
            alone = [group async for group in rollout.run(PROMPTS[:1], n=1, sampling=SAMPLING)]
            story.uneven = tokens_of(alone)
            story.moved = await rolled_out(rollout, PROMPTS, Watch(story))
            story.accepted = sum(host.view().num_accepted for host in hosts)
            await asyncio.gather(*(host.pause() for host in hosts))
            await asyncio.gather(*(host.resume() for host in hosts))
            story.paused = await rolled_out(rollout, PROMPTS[:1], Watch(story))
            victim = hosts[1].pid
            assert victim is not None, "it runs"
            story.killed = await rolled_out(rollout, PROMPTS, Watch(story, victim=victim))
            await rollout.fleet.wait_until_up()
            story.lost = [status.num_lost for status in rollout.fleet.view()]
            await rollout.update_weights(other)
            story.updated = await rolled_out(rollout, PROMPTS, Watch(story))
            processes += of_the_fleet(rollout)
        story.num_processes, story.all_ended = len(processes), await gone(processes)
        story.logs = [(home / "logs" / f"instance-{id}.log").read_text() for id in range(2)]

    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(str(home))
        patch.setenv("VLLM_LOGGING_LEVEL", "INFO")  # its logs are read, and TRL's import makes vLLM quiet
        asyncio.run(tell())
    return story


def test_each_rank_holds_half_of_the_experts(story: Story) -> None:
    """Engines that are by themselves have the same tokens."""
    for rank, log in enumerate(story.logs):
        assert f"[EP Rank {rank}/2] Expert parallelism is enabled" in log
        assert "Local/global number of experts: 4/8" in log


def test_tokens_are_those_of_the_whole_model_in_chunks_that_move_with_drafts(story: Story) -> None:
    assert story.moved == story.expected
    assert story.num_moves > 0
    assert story.num_loaded > 0, "KV moves between the ranks through the pool"
    assert story.accepted > 0


def test_a_rank_without_requests_steps_along(story: Story) -> None:
    assert story.uneven == {(0, 0): story.expected[0, 0]}


def test_ranks_pause_and_go_on_together(story: Story) -> None:
    assert story.paused == {key: tokens for key, tokens in story.expected.items() if key[0] == 0}


def test_a_rank_that_is_killed_costs_no_token_and_both_come_back(story: Story) -> None:
    assert story.killed == story.expected
    assert story.lost == [1, 1]


def test_each_rank_loads_its_own_experts_of_new_weights(story: Story) -> None:
    assert story.expected_of_other != story.expected
    assert story.updated == story.expected_of_other


def test_nothing_is_left(story: Story) -> None:
    assert story.num_processes > 8, "before the kill and after it"
    assert story.all_ended
    assert story.segments == []


def test_only_models_with_experts_share_them(story: Story, tmp_path: Path) -> None:
    from seer.engine.local.tiny import make_tiny_model

    dense = make_tiny_model(tmp_path / "dense", head_dim=HEAD_DIM)
    for model, why in (
        (dense, "the model has 0 in a layer"),
        (make_qwen3_moe(tmp_path / "moe"), "the model has 8 in a layer"),
    ):
        with pytest.raises(ConfigError, match=why):
            Rollout(model, engine="vllm", instances=16, data_parallel=16)
