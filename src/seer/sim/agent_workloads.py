# SPDX-License-Identifier: Apache-2.0
"""Workloads of agents, whose responses wait for tools between their turns: `agent-swe` and `agent-tools`.

agent-swe     generated tokens and numbers of turns as recorded: 50 tasks of tau-bench (airline), four trials each, by
              GPT-4o, counted with Qwen2.5's tokenizer (agent_swe.json; sierra-research/tau-bench, MIT). What was not
              recorded is assumed, in the size that coding agents have: prompts of 8,192 tokens, answers of a median of
              400 tokens, and tools that take a median of 2 s and up to a minute.
agent-tools   synthetic: lengths as of `synthetic`, of a mean of 1,500 tokens, in 2 to 12 turns; prompts of 4,096
              tokens; answers of a median of 300 tokens from quick tools (0.2 to 5 s)

Every number of it may be set by an option. A seed decides how responses are cut into turns, what tools give, and when.
"""

from __future__ import annotations

from dataclasses import dataclass
from importlib.resources import files

import msgspec

from seer.sim.turns import LogNormal, TurnModel

AGENT_SWE = "agent-swe"
AGENT_TOOLS = "agent-tools"


class RecordedAgent(msgspec.Struct, frozen=True):
    """Trials of one agent, by task."""

    tokens: tuple[tuple[int, ...], ...]
    """Generated in each trial, all turns together."""
    turns: tuple[tuple[int, ...], ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class AgentDefaults:
    """What a workload of agents has where no option says otherwise."""

    prompt_tokens: int
    maximum: int
    instances: int
    """Few, so that KV memory is scarce."""
    tools: TurnModel


DEFAULTS = {
    AGENT_SWE: AgentDefaults(
        prompt_tokens=8192,
        maximum=4096,
        instances=1,
        tools=TurnModel(
            tool_s=LogNormal(median=2.0, sigma=1.2, least=0.1, most=60.0),
            given_tokens=LogNormal(median=400, sigma=1.0, least=16, most=4096),
        ),
    ),
    AGENT_TOOLS: AgentDefaults(
        prompt_tokens=4096,
        maximum=8192,
        instances=2,
        tools=TurnModel(
            tool_s=LogNormal(median=1.5, sigma=0.8, least=0.2, most=5.0),
            given_tokens=LogNormal(median=300, sigma=1.0, least=16, most=2048),
        ),
    ),
}


def recorded_agent() -> RecordedAgent:
    """The trials of `agent-swe`."""
    return msgspec.json.decode(files("seer.sim").joinpath("agent_swe.json").read_bytes(), type=RecordedAgent)
