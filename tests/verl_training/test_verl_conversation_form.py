# SPDX-License-Identifier: Apache-2.0
"""What our agent loop for environments hands to verl, beside what verl's tool agent loop would; nothing is started."""

from __future__ import annotations

import asyncio
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

pytest.importorskip("verl")

from omegaconf import OmegaConf
from verl.experimental.agent_loop.agent_loop import DictConfigWrap
from verl.utils.dataset.rl_dataset import RLHFDataset
from verl.utils.tokenizer.continuous_token_wiring import create_continuous_token_builder

from chat_models import TEMPLATES, make_tokenizer
from seer.engine.local.tokenizer import Tokenizer
from seer.environments.given_tokens import given_tokens
from seer.errors import ConfigError
from seer.integrations.verl.environment_loop import EnvironmentLoop, _has_media
from seer.integrations.verl.environment_setup import LOOP, use_environment
from seer.integrations.verl.requests import Generated, Opening, Talk

QUESTION = [{"role": "user", "content": "How is the weather?"}]
TURN = {"role": "assistant", "content": "I look."}
TOOL = {"role": "tool", "content": "sunny"}
SCHEMAS = [{"type": "function", "function": {"name": "look", "parameters": {"type": "object"}}}]


class Client:
    """In the place of the driver's."""

    def __init__(self, made: Generated) -> None:
        self.made = made
        self.asked: list[tuple[list[int], bool]] = []

    async def converse(self, prompt: list[int], params: dict[str, Any], opening: Opening, *, has_media: bool) -> Any:
        self.asked.append((prompt, has_media))
        return self.made


def made(ids: list[int], mask: list[int], reward: float | None) -> Generated:
    talk = Talk(loss_mask=mask, reward=reward, num_turns=3, tool_s=0.25)
    logprobs = [-0.5 * bit for bit in mask]
    return Generated(
        token_ids=ids,
        logprobs=logprobs,
        is_cancelled=False,
        weights_version=5,
        num_chunks=1,
        num_migrations=0,
        talk=talk,
    )


def run_loop(folder: Path, client: Client, messages: list[Any], **seer: Any) -> Any:
    template, eos = TEMPLATES["chatml"]
    tokenizer = make_tokenizer(folder, template, eos=eos)
    rollout = {"prompt_length": 512, "response_length": 64, "custom": {"seer": {"environment": "a:b", **seer}}}

    async def work() -> Any:
        loop = EnvironmentLoop(
            trainer_config=DictConfigWrap(OmegaConf.create({"actor_rollout_ref": {"rollout": rollout}})),
            server_manager=client,
            tokenizer=tokenizer,
            processor=None,
            dataset_cls=RLHFDataset,
            data_config=DictConfigWrap(OmegaConf.create({})),
            tools=SimpleNamespace(tools=[]),
        )
        return await loop.run({"logprobs": True}, raw_prompt=messages, uid="a", data_source="toy")

    return asyncio.run(work())


def test_an_output_has_the_fields_of_the_tool_agent_loop(tmp_path: Path) -> None:
    client = Client(made([7, 8, 9, 7], [1, 1, 0, 1], 0.5))
    output = run_loop(tmp_path, client, QUESTION)
    assert client.asked == [(output.prompt_ids, False)]
    assert output.prompt_ids == Tokenizer(tmp_path).chat(QUESTION)
    fields = output.as_dict()
    assert fields["response_mask"].tolist() == [1, 1, 0, 1]
    assert fields["rollout_log_probs"].tolist() == [-0.5, -0.5, 0.0, -0.5]
    assert fields["rm_scores"].tolist() == [0.0, 0.0, 0.0, 0.5]
    assert fields["num_turns"] == 4
    assert fields["extra_fields"]["min_global_steps"] == 4
    assert fields["metrics"]["tool_calls"] == 0.25


def test_without_a_reward_of_the_environment_verl_computes_one(tmp_path: Path) -> None:
    output = run_loop(tmp_path, Client(made([7], [1], None)), QUESTION)
    assert "rm_scores" not in output.as_dict()


def test_schemas_of_tools_are_in_the_prompt(tmp_path: Path) -> None:
    (tmp_path / "look_tools.py").write_text(f"SCHEMAS = {SCHEMAS!r}\n")
    output = run_loop(tmp_path, Client(made([7], [1], 1.0)), QUESTION, tools=f"{tmp_path}/look_tools.py:SCHEMAS")
    assert output.prompt_ids == Tokenizer(tmp_path).chat(QUESTION, tools=SCHEMAS)


@pytest.mark.parametrize(("kind", "has_media"), [("text", False), ("image", True)])
def test_the_client_is_told_of_images(kind: str, has_media: bool) -> None:
    assert _has_media({"role": "user", "content": [{"type": kind, kind: "look"}]}) is has_media


@pytest.mark.parametrize(("name", "model_type"), [("chatml", "qwen2"), ("headers", None)])
def test_given_tokens_are_those_that_verl_merges(name: str, model_type: str | None, tmp_path: Path) -> None:
    template, eos = TEMPLATES[name]
    tokenizer = make_tokenizer(tmp_path, template, eos=eos)
    codec = Tokenizer(tmp_path)
    builder = create_continuous_token_builder(tokenizer, hf_model_type=model_type)
    [end] = codec.encode(eos)
    history = [*codec.chat(QUESTION), *codec.encode(TURN["content"]), end]
    merged = builder.merge_context_tokens([*QUESTION, TURN], [*QUESTION, TURN, TOOL], history).token_ids
    assert [*history, *given_tokens(codec, QUESTION, [TOOL], last_token=end)] == list(merged)


def config(**seer: Any) -> Any:
    rollout = {"agent": {"default_agent_loop": "single_turn_agent"}, "custom": {"seer": seer}}
    whole = OmegaConf.create(
        {"actor_rollout_ref": {"rollout": rollout}, "data": {"apply_chat_template_kwargs": {"a": 1}}}
    )
    OmegaConf.set_struct(whole, True)
    return whole.actor_rollout_ref.rollout


def test_verl_is_told_of_our_agent_loop_and_of_whole_paths(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "near_tools.py").write_text("async def tool(conversation):\n    return None\n")
    model = OmegaConf.create({"path": str(tmp_path / "model")})
    chosen = config(environment="near_tools.py:tool")
    chat = use_environment(chosen, model)
    assert chosen.agent.default_agent_loop == LOOP
    assert chosen.custom.seer.environment == f"{tmp_path}/near_tools.py:tool"
    assert chat is not None
    assert (chat.folder, chat.variables) == (tmp_path / "model", {"a": 1})
    assert use_environment(chosen, model) is not None, "the second replica finds it done"
    assert use_environment(config(), model) is None


def test_what_cannot_be_used_is_refused_before_anything_starts(tmp_path: Path) -> None:
    model = OmegaConf.create({"path": str(tmp_path)})
    with pytest.raises(ConfigError, match="no_such_module") as caught:
        use_environment(config(environment="no_such_module:tool"), model)
    assert "custom.seer.environment=" in str(caught.value.hint)
    other = config(environment="json:dumps")
    other.agent.default_agent_loop = "tool_agent"
    with pytest.raises(ConfigError, match="tool_agent"):
        use_environment(other, model)
