# SPDX-License-Identifier: Apache-2.0
"""The campaign of tests/crash/campaign.py: a part that compared nothing has not passed."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import campaign
import pytest


def test_parts_whose_tests_compared_nothing_fail(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Of three: one with a round, one whose tests come to none, one whose tests are skipped."""
    report = tmp_path / "report"
    lines = {
        "local": json.dumps({"test": "local", "seed": 1001, "rounds": 1}),
        "tcp": json.dumps({"test": "tcp", "seed": 1002, "rounds": 0}),
        "vllm": "",
    }

    def command(part: str) -> list[str]:
        code = f"open({str(report / 'report.jsonl')!r}, 'a').write({lines[part] + chr(10)!r})" if lines[part] else ""
        return [sys.executable, "-c", code]

    ended: list[str] = []

    def once(worker: campaign.Worker, code: int) -> None:
        assert code == 0, worker.log.read_text()
        worker.end_s = 0.0
        ended.append(worker.part)

    monkeypatch.setenv("TMPDIR", str(tmp_path))
    monkeypatch.setattr(campaign, "command", command)
    monkeypatch.setattr(campaign.Worker, "_look_at", once)
    assert campaign.run(["local", "tcp", "vllm"], 3, 60.0, report, 1) == 2
    assert sorted(ended) == ["local", "tcp", "vllm"]
    said = capsys.readouterr().out
    assert "tcp did not get through a round" in said
    assert "vllm did not get through a round" in said


def test_a_part_without_a_process_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "argv", ["campaign.py", "--parts", "local", "tcp", "--processes", "1"])
    with pytest.raises(SystemExit) as ended:
        campaign.main()
    assert ended.value.code == 2
