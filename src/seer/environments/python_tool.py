# SPDX-License-Identifier: Apache-2.0
"""A Python tool: code in the model's turn is run, and what it printed is given back; a turn without code is the end.

Code is a block of a Markdown fence with the word python, or a call in <tool_call> tags with a `code` argument, as the
chat template of Qwen teaches models. The last one in a turn is run.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from typing import Any

from seer.environments.base import Answer, Conversation, End, Message
from seer.environments.python_sandbox import PythonSandbox, SandboxLimits
from seer.machine.daemon_thread import in_thread
from seer.types import FinishReason

PYTHON_TOOL: Message = {
    "type": "function",
    "function": {
        "name": "python",
        "description": "Runs Python code and returns what it prints.",
        "parameters": {
            "type": "object",
            "properties": {"code": {"type": "string", "description": "the code to run"}},
            "required": ["code"],
        },
    },
}
"""Its schema, for `tools=[PYTHON_TOOL]`."""

_FENCE = re.compile(r"```(?:python|py)\n(.*?)(?:```|\Z)", re.DOTALL)
_CALL = re.compile(r"<tool_call>(.*?)(?:</tool_call>|\Z)", re.DOTALL)


class PythonTool:
    """An environment that runs the model's code and scores its last turn."""

    def __init__(
        self,
        score: Callable[[Conversation], float | None],
        *,
        limits: SandboxLimits | None = None,
        most_calls: int = 8,
    ) -> None:
        """`score` gets the conversation at its end, in a thread; at most `most_calls` pieces of code are run in one."""
        self._score = score
        self._sandbox = PythonSandbox(limits)
        self._most_calls = most_calls

    async def __call__(self, conversation: Conversation) -> Answer:
        """Run the code of the newest turn, or end."""
        code = find_code(conversation.text)
        is_full = conversation.finish_reason is FinishReason.LENGTH
        if code is None or is_full or conversation.turn > self._most_calls:
            return End(reward=await in_thread(self._score, conversation))
        return [{"role": "tool", "name": "python", "content": await self._sandbox.run(code)}]


def find_code(text: str) -> str | None:
    """The last piece of code in a text."""
    fences = [(found.start(), found.group(1)) for found in _FENCE.finditer(text)]
    calls = [(found.start(), _argument(found.group(1))) for found in _CALL.finditer(text)]
    pieces = sorted((at, code) for at, code in [*fences, *calls] if code is not None)
    return pieces[-1][1] if pieces else None


def _argument(call: str) -> str | None:
    try:
        value: Any = json.loads(call)
    except (ValueError, RecursionError):
        return None
    arguments = value.get("arguments") if isinstance(value, dict) else None
    code = arguments.get("code") if isinstance(arguments, dict) else None
    return code if isinstance(code, str) else None
