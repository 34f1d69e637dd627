# SPDX-License-Identifier: Apache-2.0
"""An agent loop of two turns for the toy: between them a "tool" says a word.

As in verl's tool agent loop, both turns have one request id, and the second sends the whole history.
"""

from __future__ import annotations

from typing import Any
from uuid import uuid4

from verl.experimental.agent_loop.agent_loop import AgentLoopBase, AgentLoopMetrics, AgentLoopOutput

FIRST_TURN_TOKENS = 24
TOOL_TOKENS = [5]
"""`now`, a word that is no digit."""


class TwoTurns(AgentLoopBase):
    """Asks twice."""

    async def run(self, sampling_params: dict[str, Any], **kwargs: Any) -> AgentLoopOutput:
        """One trajectory."""
        prompt = list(await self.ct_build_initial_tokens(list(kwargs["raw_prompt"])))
        name = uuid4().hex

        async def ask(history: list[int], **limits: int) -> Any:
            return await self.server_manager.generate(
                request_id=name, prompt_ids=history, sampling_params={**sampling_params, **limits}
            )

        first = await ask(prompt, max_tokens=FIRST_TURN_TOKENS)
        second = await ask([*prompt, *first.token_ids, *TOOL_TOKENS])
        return AgentLoopOutput(
            prompt_ids=prompt,
            response_ids=[*first.token_ids, *TOOL_TOKENS, *second.token_ids],
            response_mask=[1] * len(first.token_ids) + [0] * len(TOOL_TOKENS) + [1] * len(second.token_ids),
            response_logprobs=[*first.log_probs, *[0.0] * len(TOOL_TOKENS), *second.log_probs],
            num_turns=4,
            metrics=AgentLoopMetrics(),
            extra_fields={**second.extra_fields, "turn_scores": [], "tool_rewards": []},
        )
