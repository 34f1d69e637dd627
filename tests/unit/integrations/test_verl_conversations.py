# SPDX-License-Identifier: Apache-2.0
"""Conversations with an environment in verl: the driver runs them; over stand-ins of its servers."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest

pytest.importorskip("transformers")

from builders import a_response
from chat_models import TEMPLATES, make_tokenizer
from seer.engine.local.tokenizer import Tokenizer
from seer.environments.given_tokens import given_tokens
from seer.errors import ConfigError, InstanceError
from seer.integrations.verl.conversing import ChatTemplate, failed_at_tool, opening_of
from seer.integrations.verl.driver import SeerDriver
from seer.integrations.verl.requests import Generated, GenerateRequest, Opening, Talk
from seer.integrations.verl.settings import VerlSettings, read_settings
from seer.types import FinishReason, Sampling, Turn
from verl_servers import StandInServer
from within import within

CODE = '''
from seer import End, FinishReason, Reply

seen, closed = [], []


class Tool:
    """As many calls as the row says; the third response of a group crashes."""

    async def __call__(self, conversation):
        seen.append(conversation)
        if conversation.finish_reason is FinishReason.LENGTH or conversation.turn > conversation.row["calls"]:
            return End(reward=float(conversation.turn))
        if conversation.row.get("crashes") and conversation.index == 2:
            raise ValueError("no such city")
        return [{"role": "tool", "content": f"{conversation.turn}: sunny"}]

    def close(self, key):
        closed.append(key)


async def babbler(conversation):
    return Reply(token_ids=[100_000])


async def silent(conversation):
    return None


schemas = [{"type": "function", "function": {"name": "weather"}}]
'''
MESSAGES = [{"role": "user", "content": "How is the weather?"}]
SAMPLING = Sampling(max_tokens=60)
RESPONSE_TOKENS = 200


class Job:
    """A driver with an environment, and two servers."""

    def __init__(self, folder: Path, name: str = "Tool", **settings: Any) -> None:
        template, eos = TEMPLATES["chatml"]
        make_tokenizer(folder / "model", template, eos=eos)
        (folder / "city_tools.py").write_text(CODE)
        self.driver = SeerDriver(
            VerlSettings(environment=f"{folder / 'city_tools.py'}:{name}", run_dir=folder / "run", **settings),
            num_servers=2,
            node="here",
            address="",
            run_dir="",
            model="fake",
            response_tokens=RESPONSE_TOKENS,
            chat=ChatTemplate(folder=folder / "model"),
        )
        self.codec = Tokenizer(folder / "model")
        self.servers = [StandInServer(rank, max_num_seqs=4) for rank in range(2)]

    async def __aenter__(self) -> Job:
        for rank, server in enumerate(self.servers):
            await self.driver.add_server(rank, server, "here")
            await server.sync(1)
        await self.driver.begin_rollout(1, False)
        return self

    async def __aexit__(self, kind: type[BaseException] | None, *_: Any) -> None:
        if kind is None:  # a test that failed says why: closing may fail, or wait, for the same reason
            await self.driver.close()

    async def converse(self, group: str, n: int, **columns: Any) -> list[Generated]:
        prompt = tuple(self.codec.chat(MESSAGES))
        request = GenerateRequest(
            group=group, num_siblings=n, prompt=prompt, sampling=SAMPLING, opening=opening(**columns)
        )
        packed = msgspec.msgpack.encode(request)
        made = await asyncio.gather(*(self.driver.generate(packed) for _ in range(n)))
        return [msgspec.msgpack.decode(one, type=Generated) for one in made]

    def loaded(self) -> Any:
        """The user's module, as the driver has it."""
        assert self.driver._conversing is not None
        return __import__("sys").modules[type(self.driver._conversing._environment).__module__]


def opening(**columns: Any) -> Opening:
    return opening_of({"raw_prompt": np.array(MESSAGES, dtype=object), "uid": "u", "session_id": 3, **columns})


def talk(made: Generated) -> Talk:
    assert made.talk is not None
    return made.talk


@within(60)
async def test_a_conversation_is_one_response_with_its_mask_and_its_reward(tmp_path: Path) -> None:
    async with Job(tmp_path) as job:
        made = await job.converse("a", 4, calls=1)
        [end] = job.codec.encode("<|im_end|>")
        for one in made:
            mask = talk(one).loss_mask
            assert len(mask) == len(one.token_ids) == len(one.logprobs)
            assert all(logprob == 0.0 for bit, logprob in zip(mask, one.logprobs, strict=True) if not bit)
            first = mask.index(0) if 0 in mask else len(mask)
            if first == len(mask):
                assert talk(one).reward == 1.0, "no room for a second turn"
                continue
            assert talk(one).reward == 2.0
            assert talk(one).num_turns == 3
            given = [token for bit, token in zip(mask, one.token_ids, strict=True) if not bit]
            tool = [{"role": "tool", "content": "1: sunny"}]
            assert given == given_tokens(job.codec, MESSAGES, tool, last_token=one.token_ids[first - 1])
            assert given[0] == end, "the fake model does not end its turns as the template does"
            assert mask == [1] * first + [0] * len(given) + [1] * (len(mask) - first - len(given))
        assert any(0 in talk(one).loss_mask for one in made)
        assert sum(sum(talk(one).loss_mask) for one in made) == sum(
            logprob != 0 for one in made for logprob in one.logprobs
        )
        assert len({tuple(one.token_ids) for one in made}) == 4


@within(60)
async def test_the_environment_gets_the_row_and_the_messages_and_is_told_of_each_end(tmp_path: Path) -> None:
    async with Job(tmp_path) as job:
        await job.converse("a", 2, calls=np.int64(0), extra_info={"city": "Bern"}, image=object())
        module = job.loaded()
        for conversation in module.seen:
            assert conversation.row == {"calls": 0, "extra_info": {"city": "Bern"}}
            assert list(conversation.messages[:-1]) == MESSAGES
            assert conversation.prompt_id == "a"
        assert sorted(conversation.index for conversation in module.seen) == [0, 1]
        assert sorted(module.closed) == sorted(conversation.key for conversation in module.seen)


@within(60)
async def test_a_tool_that_fails_masks_its_response_and_loses_none(tmp_path: Path) -> None:
    async with Job(tmp_path) as job:
        made = await job.converse("a", 8, calls=1, crashes=True)
        failed = [one for one in made if not any(talk(one).loss_mask)]
        assert len(failed) == 1
        assert talk(failed[0]).reward == 0.0
        assert failed[0].token_ids
        await job.driver.check_rollout()
        numbers = await job.driver.finish_step(1, {})
        assert numbers["tool_failures"] == 1
        assert numbers["responses"] == 7
        assert numbers["failed_responses"] == 0
        assert numbers["turns_mean"] > 1
        assert "stock_rollout_s" not in numbers, "its replay knows no waits"


@within(60)
async def test_a_conversation_whose_server_dies_goes_on_elsewhere(tmp_path: Path) -> None:
    async with Job(tmp_path) as job:
        asked = asyncio.create_task(job.converse("a", 8, calls=2))
        await job.servers[1].has_work.wait()
        job.servers[1].kill()
        made = await asked
        assert all(talk(one).reward for one in made)
        assert (await job.driver.finish_step(1, {}))["servers_lost"] == 1


@pytest.mark.parametrize(("kind", "is_tools_fault"), [("generated", False), ("given", True)])
def test_an_engine_that_fails_in_a_turn_is_no_failed_tool(kind: Any, is_tools_fault: bool) -> None:
    response = a_response([1, 2, 3], turns=[Turn(kind, 0, 3, 0.0, 1.0)], finish_reason=FinishReason.FAILED)
    assert failed_at_tool(response) is is_tools_fault


@within(60)
async def test_without_a_server_a_conversation_is_a_lost_response(tmp_path: Path) -> None:
    async with Job(tmp_path) as job:
        for server in job.servers:
            server.kill()
        with pytest.raises(InstanceError):
            await job.converse("a", 1, calls=1)
        with pytest.raises(InstanceError, match="lost"):
            await job.driver.check_rollout()


@within(60)
async def test_a_conversation_has_at_most_the_tokens_of_a_response(tmp_path: Path) -> None:
    async with Job(tmp_path) as job:
        made = await job.converse("a", 8, calls=100)
        assert max(len(one.token_ids) for one in made) <= RESPONSE_TOKENS
        assert max(sum(talk(one).loss_mask) for one in made) <= SAMPLING.max_tokens


@within(60)
async def test_without_a_reward_verls_function_is_asked(tmp_path: Path) -> None:
    async with Job(tmp_path, "silent") as job:
        [made] = await job.converse("a", 1)
        assert talk(made).reward is None


@within(60)
async def test_tokens_that_the_model_does_not_have_fail_their_response(tmp_path: Path) -> None:
    async with Job(tmp_path, "babbler") as job:
        made = await job.converse("a", 4)
        assert any(not any(talk(one).loss_mask) for one in made)
        await job.driver.check_rollout()


def test_siblings_have_one_opening_and_other_rows_another() -> None:
    assert opening(calls=1) == opening(calls=1, session_id=4, global_steps=7)
    assert opening(calls=1) != opening(calls=2)


def test_verls_template_and_its_variables_are_the_drivers(tmp_path: Path) -> None:
    template, eos = TEMPLATES["chatml"]
    make_tokenizer(tmp_path, template, eos=eos)
    other = "{% for m in messages %}{{ m.content }}{{ mark }}{% endfor %}"
    codec = ChatTemplate(folder=tmp_path, template=other, variables={"mark": "!"}).codec()
    assert codec.chat_text(MESSAGES) == "How is the weather?!"


def test_a_model_that_is_no_folder_of_the_driver_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="no folder of the driver's machine"):
        ChatTemplate(folder=tmp_path / "nothing").codec()


def test_tools_without_an_environment_are_refused() -> None:
    with pytest.raises(ConfigError, match="there is none") as caught:
        read_settings({"seer": {"tools": "city_tools:schemas"}})
    assert "environment=MODULE:NAME" in str(caught.value.hint)
