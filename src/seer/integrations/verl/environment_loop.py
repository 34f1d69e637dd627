# SPDX-License-Identifier: Apache-2.0
"""The agent loop of `custom.seer.environment`: one call to the driver, which runs the whole conversation.

Its output has the form of verl's tool agent loop: the mask is 0 where the environment gave tokens, and so are their
log-probabilities; a reward that the environment gave takes the place of verl's reward function.
"""

from __future__ import annotations

import functools
from collections.abc import Mapping
from typing import Any

from verl.experimental.agent_loop.agent_loop import AgentLoopBase, AgentLoopMetrics, AgentLoopOutput, register
from verl.utils.profiler import simple_timer
from verl.utils.rollout_trace import rollout_trace_op

from seer.environments.base import Message
from seer.environments.named import load_tools
from seer.integrations.verl.client import steps_of
from seer.integrations.verl.conversing import opening_of
from seer.integrations.verl.environment_setup import LOOP
from seer.integrations.verl.settings import TOOLS, read_settings


@register(LOOP)
class EnvironmentLoop(AgentLoopBase):
    """Asks the driver for one conversation."""

    @rollout_trace_op  # type: ignore[untyped-decorator]
    async def run(self, sampling_params: dict[str, Any], **columns: Any) -> AgentLoopOutput:
        """One trajectory; `columns` are those of the dataset's row."""
        messages = [*columns["raw_prompt"]]
        timing: dict[str, float] = {}
        tools = _schemas(read_settings(self.rollout_config.custom).tools)
        prompt = [*await self.ct_build_initial_tokens(messages, tools=tools)]
        with simple_timer("generate_sequences", timing):
            made = await self.server_manager.converse(
                prompt, sampling_params, opening_of(columns), has_media=any(map(_has_media, messages))
            )
        assert made.talk is not None, "the driver was given an opening"
        return AgentLoopOutput(
            prompt_ids=prompt,
            response_ids=made.token_ids,
            response_mask=made.talk.loss_mask,
            response_logprobs=made.logprobs if sampling_params.get("logprobs") else None,
            reward_score=made.talk.reward,
            num_turns=1 + made.talk.num_turns,
            metrics=AgentLoopMetrics(
                generate_sequences=timing["generate_sequences"] - made.talk.tool_s, tool_calls=made.talk.tool_s
            ),
            extra_fields={**steps_of(made), "turn_scores": [], "tool_rewards": []},
        )


@functools.cache
def _schemas(name: str | None) -> list[Message] | None:
    """Loaded once in a process, which has an agent loop for each response."""
    return None if name is None else [*load_tools(name, TOOLS)]


def _has_media(message: Mapping[str, Any]) -> bool:
    content = message.get("content")
    if content is None or isinstance(content, str):
        return False
    return any(part.get("type") != "text" for part in content)
