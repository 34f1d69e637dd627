# SPDX-License-Identifier: Apache-2.0
"""New weights handed from one process to another where they are, in GPU memory."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest

pytest.importorskip("torch")

import torch

from seer import HostingConfig, Rollout, Sampling
from seer.engine.local.tiny import make_tiny_model, tiny_config, tiny_weights

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")]

PROMPTS = [[1, 2, 3 + i] for i in range(4)]


@pytest.mark.parametrize("in_place", [True, False])
def test_the_new_weights_are_the_ones_that_sample(tmp_path: Path, in_place: bool) -> None:
    old, new = make_tiny_model(tmp_path / "old", seed=0), make_tiny_model(tmp_path / "new", seed=1)
    hosting = HostingConfig(pin_cores=False, progress_deadline_s=300, weights_in_place=in_place)
    sampling = Sampling(max_tokens=24, ignore_eos=True)

    async def tokens(model: Path, *, update: bool) -> list[list[int]]:
        settings = {"device": "cuda", "dtype": "float32", "kv_memory_bytes": 64 << 20, "speculation": "off"}
        async with Rollout(model, hosting=hosting, **settings) as rollout:  # type: ignore[arg-type]
            if update:
                weights = {name: one.cuda() for name, one in tiny_weights(tiny_config(), seed=1).items()}
                assert await rollout.update_weights(weights) == 1
            groups = [group async for group in rollout.run(PROMPTS, n=2, sampling=sampling)]
        ordered = sorted(groups, key=lambda group: group.group)
        return [response.token_ids for group in ordered for response in group.responses]

    async def scenario() -> None:
        updated = await tokens(old, update=True)
        assert updated == await tokens(new, update=False)
        assert updated != await tokens(old, update=False)

    asyncio.run(scenario())
