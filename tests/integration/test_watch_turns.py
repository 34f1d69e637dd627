# SPDX-License-Identifier: Apache-2.0
"""Waiting for a tool is a state that one can see: on the live page, in `seer top`, in the report, in a real browser."""

from __future__ import annotations

import json
import shutil
import subprocess
from pathlib import Path

import pytest

pytest.importorskip("fastapi")

import httpx

from commands import DEADLINE_S, a_command, wait_until
from seer.cli.main import main

CHROMIUM = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")
FAKE = ("--engine", "fake", "--model", "none", "--instances", "2", "--no-pin")
TOOL = '''
import asyncio
from pathlib import Path

from seer import End, Reply


async def tool(conversation):
    """The first turns wait for a file; response 1 of prompt 0 then fails, the others end at their second turn."""
    while conversation.turn == 1 and not Path("go").exists():
        await asyncio.sleep(0.01)
    if conversation.key == (0, 1):
        raise RuntimeError("no such tool")
    return End(reward=1.0) if conversation.turn == 2 else Reply(token_ids=[5, 6, 7])
'''
NUM_RESPONSES = 8


def in_browser(url: str, folder: Path) -> str:
    """The page as a browser has it after its script ran; it must have drawn without a complaint."""
    assert CHROMIUM is not None
    words = (CHROMIUM, "--headless", "--no-sandbox", "--disable-gpu", f"--user-data-dir={folder}/chromium")
    drawn = (*words, "--enable-logging=stderr", "--v=0", "--window-size=1200,2600", f"--screenshot={folder}/page.png")
    shown = subprocess.run([*drawn, url], capture_output=True, text=True, timeout=120, check=True)
    assert "CONSOLE" not in shown.stderr
    assert (folder / "page.png").stat().st_size > 20_000
    dumped = subprocess.run([*words, "--dump-dom", url], capture_output=True, text=True, timeout=120, check=True)
    return dumped.stdout


@pytest.fixture
def run(tmp_path: Path) -> Path:
    (tmp_path / "waiting_tool.py").write_text(TOOL)
    lines = "".join(json.dumps({"prompt_token_ids": [i, 2]}) + "\n" for i in range(1, 5))
    (tmp_path / "p.jsonl").write_text(lines)
    return tmp_path


def test_requests_at_their_tools_are_on_the_live_page_in_top_and_in_the_report(
    run: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    words = ("rollout", "--prompts", "p.jsonl", "--n", "2", "--max-tokens", "60", "--environment", "waiting_tool:tool")
    process = a_command(*words, *FAKE, "--run-dir", "run", "--metrics-port", "0", cwd=run)
    try:
        assert process.stderr is not None
        url = process.stderr.readline().split()[2].rstrip(",").rstrip("/")
        waiting = f'seer:num_requests{{state="at_tool"}} {NUM_RESPONSES}.0'
        wait_until(lambda: waiting in httpx.get(f"{url}/metrics").text, "not all wait for their tool", process)
        assert main(["top", url, "--once"]) == 0
        assert f"{NUM_RESPONSES} at a tool" in capsys.readouterr().out
        if CHROMIUM is not None:
            page = in_browser(f"{url}/", run)
            assert f"<dt>at a tool</dt><dd>{NUM_RESPONSES}</dd>" in page
            assert f"{NUM_RESPONSES} waits for tools" in page
        (run / "go").touch()
        _, errors = process.communicate(timeout=DEADLINE_S)
    finally:
        process.kill()
        process.wait(DEADLINE_S)
    assert process.returncode == 1, errors  # one response failed
    summary = json.loads((run / "run" / "run.json").read_text())["summary"]
    assert (summary["num_turns"], summary["tool_failures"]) == (2 * NUM_RESPONSES - 1, 1)
    assert summary["tool_wait_s"] > 0
    check_report(run)


def check_report(run: Path) -> None:
    assert main(["report", str(run / "run")]) == 0
    [page] = run.rglob("report.html")
    text = in_browser(page.as_uri(), run) if CHROMIUM is not None else page.read_text()
    assert f"<b>{2 * NUM_RESPONSES - 1}</b><span>turns that waited for tools</span>" in text
    assert "<b>1</b><span>tool failures</span>" in text
    assert text.count("waits for its tool after turn 1") == NUM_RESPONSES
    trace = json.loads(next(run.rglob("trace.json")).read_text()) if list(run.rglob("trace.json")) else None
    if trace is not None:
        assert sum(one.get("name") == "waits for its tool" for one in trace["traceEvents"]) == 2 * NUM_RESPONSES - 1
