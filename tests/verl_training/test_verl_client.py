# SPDX-License-Identifier: Apache-2.0
"""What the client of an agent loop sends to the driver; nothing is started."""

from __future__ import annotations

import asyncio
from types import SimpleNamespace
from typing import Any

import msgspec
import pytest

pytest.importorskip("verl")

from omegaconf import OmegaConf
from verl.workers.rollout.replica import TokenOutput

from seer.errors import ConfigError
from seer.integrations.verl.client import SeerClient
from seer.integrations.verl.requests import Generated, GenerateRequest
from seer.types import Sampling

MADE = Generated(token_ids=[3], logprobs=[-1.0], is_cancelled=False, weights_version=5, num_chunks=1, num_migrations=0)


class Driver:
    """Notes what it is asked."""

    def __init__(self) -> None:
        self.asked: list[GenerateRequest] = []
        self.failures: list[str] = []
        self.generate = SimpleNamespace(remote=self._generate)
        self.note_failure = SimpleNamespace(remote=self._note_failure)

    async def _generate(self, request: bytes) -> bytes:
        self.asked.append(msgspec.msgpack.decode(request, type=GenerateRequest))
        return msgspec.msgpack.encode(MADE)

    async def _note_failure(self, error: str) -> None:
        self.failures.append(error)


def ask(driver: Driver, params: dict[str, Any], **more: Any) -> TokenOutput:
    rollout = {"prompt_length": 16, "response_length": 96}
    client = SeerClient(OmegaConf.create({"actor_rollout_ref": {"rollout": rollout}}), driver)

    async def work() -> TokenOutput:
        return await client.generate("one", prompt_ids=[1, 2], sampling_params=params, **more)

    return asyncio.run(work())


def test_validation_has_the_sampling_that_it_is_given() -> None:
    driver = Driver()
    ask(driver, {"temperature": 1.0, "top_p": 0.9, "top_k": -1})
    ask(driver, {"temperature": 0, "top_p": 1.0, "top_k": -1})
    assert [one.sampling for one in driver.asked] == [
        Sampling(max_tokens=96, temperature=1.0, top_p=0.9),
        Sampling(max_tokens=96, temperature=0.0),
    ]


def test_turns_of_a_conversation_are_named() -> None:
    driver = Driver()
    made = ask(driver, {}, priority=3)
    assert driver.asked[0].request_id == "one"
    assert made.extra_fields["global_steps"] == 4


@pytest.mark.parametrize(("params", "more"), [({"stop": ["a"]}, {}), ({}, {"image_data": [object()]})])
def test_what_is_refused_is_a_lost_response(params: dict[str, Any], more: dict[str, Any]) -> None:
    driver = Driver()
    with pytest.raises(ConfigError, match="not supported"):
        ask(driver, params, **more)
    assert len(driver.failures) == 1
