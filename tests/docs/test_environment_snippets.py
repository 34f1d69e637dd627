# SPDX-License-Identifier: Apache-2.0
"""The environments that the docs show run as they stand there, on a tiny model in the place of SmolLM2."""

from __future__ import annotations

import ast
import asyncio
import platform
import sys
import warnings
from pathlib import Path
from typing import Any

import pytest

from markdown_pages import ROOT, Block, code_blocks

MODEL = 'Rollout("smollm2", instances=2)'
BLOCKS = [block for block in code_blocks(ROOT / "docs" / "environments.md") if MODEL in block.text]

pytestmark = pytest.mark.skipif(
    sys.platform != "linux" or platform.machine() != "x86_64", reason="the sandbox is of Linux on x86-64"
)


@pytest.mark.parametrize("block", BLOCKS, ids=lambda block: block.where)
def test_the_example_runs_and_prints_every_group(block: Block, model: Path, capsys: pytest.CaptureFixture[str]) -> None:
    if "reasoning_gym" in block.text:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # what its imports say
            pytest.importorskip("reasoning_gym")
    text = block.text.replace(MODEL, f"Rollout({str(model)!r}, instances=1, kv_blocks=1024)")
    code = compile(text, block.where, "exec", flags=ast.PyCF_ALLOW_TOP_LEVEL_AWAIT)
    names: dict[str, Any] = {}
    asyncio.run(eval(code, names))
    assert capsys.readouterr().out.strip()
    summary = names["rollout"].summary
    assert summary.num_requests > 0
    assert summary.tool_failures == 0


def test_the_examples_are_found() -> None:
    assert len(BLOCKS) == 5
    for name in ("PythonTool(", "TextGame(", "ReasoningTasks("):
        assert any(name in block.text for block in BLOCKS), f"{name}...) has no example"
