# SPDX-License-Identifier: Apache-2.0
"""The Python tool on the embedded engine with a chat template: tools that misbehave fail their response alone."""

from __future__ import annotations

import asyncio
import contextlib
import platform
import sys
from dataclasses import replace
from pathlib import Path

import pytest

pytest.importorskip("torch")
pytest.importorskip("transformers")

from chat_models import SPECIAL, TEMPLATES, make_tokenizer
from seer import Conversation, End, FinishReason, HostingConfig, Response, Rollout, Sampling
from seer.engine.local.tiny import make_tiny_model
from seer.environments import sandbox_main
from seer.environments.base import Answer
from seer.environments.python_sandbox import PythonSandbox, SandboxLimits
from seer.environments.python_tool import PYTHON_TOOL

pytestmark = pytest.mark.skipif(
    sys.platform != "linux" or platform.machine() != "x86_64", reason="the sandbox is of Linux on x86-64"
)
INSIDE = Path(sandbox_main.__file__)
TOO_LONG = "longer than 1 s"
CODES = [
    ("print(6 * 7)", None),
    ("while True: pass", TOO_LONG),
    ("import os; os.abort()", "died of signal"),
    ("import sys\nfor _ in range(1 << 20): sys.stdout.write('x' * 1024)", "more than 4,096 bytes"),
    ("import os; os.fork()", "tried to make another process"),
    ("import os\ntry:\n    os.fork()\nexcept OSError:\n    print('no')", "tried to make another process"),
    ("import subprocess; subprocess.run(['true'])", "tried to make another process"),
    ("import socket; socket.socket()", None),
    ("x = 'x' * (1 << 40)", None),
]


def sandboxes() -> list[str]:
    """Processes of this machine that run a tool's code on our behalf, their forks included."""
    found = []
    for process in Path("/proc").iterdir():
        if process.name.isdigit():
            with contextlib.suppress(OSError):  # it has just ended
                command = (process / "cmdline").read_bytes().decode()
                if str(INSIDE) in command:
                    found.append(command)
    return found


def test_tools_that_hang_crash_print_a_gigabyte_or_fork_end_their_own_response(tmp_path: Path) -> None:
    end = SPECIAL.index("<|im_end|>")
    model = make_tiny_model(tmp_path / "model", vocab_size=264, eos_token_id=end, max_position_embeddings=2048)
    template, eos = TEMPLATES["chatml"]
    reference = make_tokenizer(model, template, eos=eos)
    limits = SandboxLimits(time_s=120.0, max_output_bytes=4096)  # on a busy machine a start alone takes seconds
    sandbox, hasty = PythonSandbox(limits), PythonSandbox(replace(limits, time_s=1.0))

    async def environment(conversation: Conversation) -> Answer:
        if conversation.turn == 2 or conversation.finish_reason is FinishReason.LENGTH:
            return End(reward=1.0)
        code, reason = CODES[conversation.group]
        printed = await (hasty if reason == TOO_LONG else sandbox).run(code)
        return [{"role": "tool", "content": printed[-80:]}]

    async def scenario() -> dict[int, list[Response]]:
        hosting = HostingConfig(pin_cores=False)
        async with Rollout(model, instances=1, kv_blocks=1024, hosting=hosting) as rollout:
            prompts = [[{"role": "user", "content": f"Question {i}"}] for i in range(len(CODES))]
            sampling = Sampling(max_tokens=600, stop_token_ids=tuple(range(200, 230)))
            run = rollout.run(
                prompts,
                n=2,
                sampling=sampling,
                environment=environment,
                environment_deadline_s=300.0,
                tools=[PYTHON_TOOL],
            )
            return {group.group: list(group.responses) async for group in run}

    found = asyncio.run(scenario())
    assert not sandboxes(), "a tool's process was left behind"
    for group, (_, reason) in enumerate(CODES):
        for response in found[group]:
            if reason is None:
                assert (response.error, response.reward) == (None, 1.0)
            else:
                assert response.finish_reason is FinishReason.FAILED
                assert reason in (response.error or "")
    answered = found[0][0]
    given = next(turn for turn in answered.turns if turn.kind == "given" and turn.end > turn.start)
    text = reference.decode(answered.token_ids[given.start : given.end])
    assert str(text).endswith("<|im_start|>tool\n42\n<|im_end|>\n<|im_start|>assistant\n")
    assert "PermissionError" in (found[7][0].text or "")
