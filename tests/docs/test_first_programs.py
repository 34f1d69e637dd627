# SPDX-License-Identifier: Apache-2.0
"""The first programs that a newcomer runs, as they stand there, on a tiny model in the place of SmolLM2."""

from __future__ import annotations

from pathlib import Path

import pytest

from markdown_pages import ROOT, code_blocks

MODEL = 'Rollout("smollm2", instances=2)'
QUICKSTART = ROOT / "examples" / "quickstart.py"
TUTORIAL = [block for block in code_blocks(ROOT / "docs" / "tutorial.md") if block.language == "python"]
PROGRAMS = [
    pytest.param(QUICKSTART.read_text(), 8, id="quickstart.py"),
    *(pytest.param(block.text, num_lines, id=block.where) for block, num_lines in zip(TUTORIAL, (8, 1), strict=True)),
]
"""With the number of lines that each prints at least; a text of random bytes may have more."""


@pytest.mark.parametrize(("program", "num_lines"), PROGRAMS)
def test_the_program_runs_and_prints_every_response(
    program: str, num_lines: int, model: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert program.count(MODEL) == 1
    text = program.replace(MODEL, f"Rollout({str(model)!r}, instances=1, kv_blocks=1024)")
    exec(compile(text, "program", "exec"), {"__name__": "__main__"})
    assert len(capsys.readouterr().out.splitlines()) >= num_lines
