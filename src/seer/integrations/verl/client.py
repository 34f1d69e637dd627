# SPDX-License-Identifier: Apache-2.0
"""verl's LLM client, asking the driver instead of a server. Agent loops use it as they use verl's.

The group of a request is not among the arguments of verl's `generate`: `agent_loops.py` sets it in a context variable
for the task of each agent loop.
"""

from __future__ import annotations

from contextvars import ContextVar
from typing import Any, NamedTuple

import msgspec
from verl.utils import normalize_token_ids
from verl.utils.rollout_trace import rollout_trace_op
from verl.workers.rollout.llm_server import LLMServerClient
from verl.workers.rollout.replica import TokenOutput

from seer.errors import ConfigError
from seer.integrations.verl.requests import Generated, GenerateRequest, Opening
from seer.integrations.verl.sampling import Lengths, sampling_of
from seer.integrations.verl.versions import global_steps


class Member(NamedTuple):
    """Which group the agent loop of this task belongs to."""

    group: str
    num_siblings: int


CURRENT: ContextVar[Member | None] = ContextVar("seer_current_member", default=None)


class SeerClient(LLMServerClient):
    """Passes requests to the driver."""

    def __init__(self, config: Any, driver: Any, load_balancer_handle: Any = None) -> None:
        super().__init__(config, load_balancer_handle)
        self._driver = driver
        rollout = config.actor_rollout_ref.rollout
        self._lengths = Lengths(rollout.prompt_length, rollout.response_length)
        self._ignore_eos = bool(rollout.get("ignore_eos", False))

    @rollout_trace_op  # type: ignore[untyped-decorator]
    async def generate(
        self,
        request_id: str,
        *,
        prompt_ids: Any,
        sampling_params: dict[str, Any],
        image_data: Any = None,
        video_data: Any = None,
        audio_data: Any = None,
        **_: Any,
    ) -> TokenOutput:
        """One response; the signature is verl's.

        `priority` is not used: it orders the queue of a vLLM server with scheduling_policy=priority, which is refused.
        """
        has_media = any(data is not None for data in (image_data, video_data, audio_data))
        made = await self._ask(request_id, prompt_ids, sampling_params, None, has_media=has_media)
        return TokenOutput(
            token_ids=made.token_ids,
            log_probs=made.logprobs if sampling_params.get("logprobs") else None,
            stop_reason="aborted" if made.is_cancelled else "completed",
            num_preempted=0,
            extra_fields=steps_of(made),
        )

    async def converse(
        self, prompt_ids: Any, sampling_params: dict[str, Any], opening: Opening, *, has_media: bool = False
    ) -> Generated:
        """One conversation with the run's environment, from the first turn to its end."""
        return await self._ask("", prompt_ids, sampling_params, opening, has_media=has_media)

    async def _ask(
        self, request_id: str, prompt_ids: Any, params: dict[str, Any], opening: Opening | None, *, has_media: bool
    ) -> Generated:
        try:
            if has_media:
                raise ConfigError("prompts with images, video or audio are not supported", hint="use rollout.name=vllm")
            request = self._request(request_id, tuple(normalize_token_ids(prompt_ids)), params, opening)
        except ConfigError as error:  # verl would train on what is left of the group
            await self._driver.note_failure.remote(str(error))
            raise
        answer = await self._driver.generate.remote(msgspec.msgpack.encode(request))
        return msgspec.msgpack.decode(answer, type=Generated)

    def _request(
        self, request_id: str, prompt: tuple[int, ...], params: dict[str, Any], opening: Opening | None
    ) -> GenerateRequest:
        member = CURRENT.get() or Member(request_id, 1)
        return GenerateRequest(
            group=member.group,
            num_siblings=member.num_siblings,
            prompt=prompt,
            request_id=request_id,
            sampling=sampling_of(params, len(prompt), self._lengths, ignore_eos=self._ignore_eos),
            opening=opening,
        )


def steps_of(made: Generated) -> dict[str, int]:
    """verl's names of the weights version of a response."""
    step = global_steps(made.weights_version)
    return {"global_steps": step, "min_global_steps": step, "max_global_steps": step}
