# SPDX-License-Identifier: Apache-2.0
"""A hosted rollout with its instances on one GPU: pool, drafts, a killed instance, and the CPU's tokens in fp32."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import pytest

from faults import KillOnce

torch = pytest.importorskip("torch")
if not torch.cuda.is_available():
    pytest.skip("there is no CUDA device", allow_module_level=True)

from seer import GroupResult, HostingConfig, Rollout, Sampling
from seer.engine.local.tiny import make_tiny_model

pytestmark = pytest.mark.gpu
PROMPTS = [[3 + i, 7, 11, 5 + i, 9] for i in range(6)]
SAMPLING = Sampling(max_tokens=80)


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_tiny_model(tmp_path_factory.mktemp("model") / "tiny")


def rolled_out(model: Path, *, kill: bool = False, **settings: Any) -> tuple[dict[tuple[int, int], list[int]], Rollout]:
    async def scenario() -> tuple[list[GroupResult], Rollout]:
        defaults: dict[str, Any] = {"kv_memory_bytes": 64 << 20, "max_num_seqs": 8, "chunk_tokens": 16}
        async with Rollout(model, **defaults | {"dtype": "float32"} | settings) as rollout:
            watch: dict[str, Any] = {"events": KillOnce(rollout.fleet.instances[1], request=2)} if kill else {}
            groups = [group async for group in rollout.run(PROMPTS, n=4, sampling=SAMPLING, **watch)]
            return groups, rollout

    groups, rollout = asyncio.run(scenario())
    return {(r.group, r.index): r.token_ids for group in groups for r in group.responses}, rollout


def test_two_instances_on_a_gpu_give_the_tokens_of_the_cpu(model: Path) -> None:
    expected, _ = rolled_out(model, instances=1, hosting=HostingConfig(pin_cores=False))
    tokens, rollout = rolled_out(model, instances=2, device="cuda", share_gpus=True)
    assert tokens == expected
    assert rollout.fleet.num_lost == 0


def test_a_killed_instance_on_a_gpu_changes_no_token(model: Path) -> None:
    expected, _ = rolled_out(model, instances=2, device="cuda", share_gpus=True)
    tokens, rollout = rolled_out(model, instances=2, device="cuda", share_gpus=True, kill=True)
    assert rollout.fleet.num_lost >= 1
    assert tokens == expected
