# SPDX-License-Identifier: Apache-2.0
"""A tool for the toy, and how the model calls it: by the word `now`, which ends its turn.

`multi_turn.function_tool_path` names this file, so verl loads it in its agent-loop workers.
"""

from __future__ import annotations

from typing import Any

from verl.experimental.agent_loop.tool_parser import FunctionCall, ToolParser
from verl.tools.function_tool import function_tool

CALL_TOKEN = 5
"""`now`."""


def digit() -> str:
    """A digit."""
    return "7"


function_tool(digit)


@ToolParser.register("toy")
class ToyToolParser(ToolParser):
    """Turns that end with the call."""

    @property
    def stop_token_ids(self) -> list[int]:
        return [CALL_TOKEN]

    async def extract_tool_calls(self, responses_ids: list[int], tools: Any = None) -> tuple[str, list[FunctionCall]]:
        calls = [FunctionCall(name="digit", arguments="{}")] if responses_ids[-1] == CALL_TOKEN else []
        return self.tokenizer.decode(responses_ids), calls
