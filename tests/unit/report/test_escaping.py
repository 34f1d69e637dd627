# SPDX-License-Identifier: Apache-2.0
"""No text of a run's folder becomes a part of the page's HTML, whatever it says and wherever it stands."""

from __future__ import annotations

import json
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import pytest

from seer.cli.main import main
from seer.metrics.events import Ended, Queued, Started, Stepped, Stopped
from seer.metrics.jsonl import EventLog
from seer.runs.run_folder import RunFolder

HOSTILE = '<u></title></style><script>alert(1)</script><img src=x onerror="alert(2)" \'&amp;'
TAGS = {"html", "head", "meta", "title", "style", "body", "h1", "h2", "h3", "p", "div", "b", "span", "i", "table"}
TAGS |= {"tr", "th", "td", "svg", "rect", "line", "text", "path", "circle"}

MANIFEST: dict[str, Any] = {
    "command": "rollout",
    "options": {"scheduler": "seer", "instances": 1, "model": "m", "engine": "local", "pool": "local", "dtype": "x"},
    "limits": {"kv_blocks": 8, "block_size": 16, "max_num_seqs": 4, "max_model_len": 128},
    "machine": {"cpu": "a", "cores": 2, "system": "b", "python": "c"},
    "status": "finished",
    "error": "e",
    "model_dir": "d",
    "summary": {"num_tokens": 3, "throughput_tokens_s": 1.5},
    "verification": {"is_clean": True, "num_responses": 2, "weights": "w", "findings": []},
}


class Tags(HTMLParser):
    def __init__(self, page: str) -> None:
        super().__init__()
        self.found: set[str] = set()
        self.attributes: set[str] = set()
        self.feed(page)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.found.add(tag)
        self.attributes |= {name for name, _ in attrs}


def leaves(value: Any, at: tuple[str, ...] = ()) -> list[tuple[str, ...]]:
    if not isinstance(value, dict):
        return [at]
    return [leaf for key, below in value.items() for leaf in leaves(below, (*at, key))]


def hostile_at(*path: str) -> dict[str, Any]:
    changed: dict[str, Any] = json.loads(json.dumps(MANIFEST))
    place = changed
    for key in path[:-1]:
        place = place[key]
    place[path[-1]] = HOSTILE
    return changed


def a_run(folder: Path, manifest: dict[str, Any], *, reason: str = "stop") -> RunFolder:
    run = RunFolder(folder)
    run.create()
    run.write_manifest(manifest)
    with EventLog(run.events, {}) as log:
        log(Queued(0.0, 0, 0, 0, 10))
        log(Started(0.0, 0, 0, 16, None, False))
        log(Stepped(0.5, 0, 1, 0.1, 4, 0, 1, 1, 0))
        log(Stopped(1.0, 0, 0, 16, reason))
        log(Ended(2.0, 0, 30, "stop"))
    return run


def check_page(path: Path) -> None:
    page = path.read_text()
    tags = Tags(page)
    assert tags.found <= TAGS
    assert not any(name.startswith("on") for name in tags.attributes)
    assert "<script" not in page
    assert "default-src 'none'" in page


@pytest.mark.parametrize("path", leaves(MANIFEST), ids=".".join)
def test_hostile_text_is_shown_as_text_or_refused(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], path: tuple[str, ...]
) -> None:
    run = a_run(tmp_path / "run", hostile_at(*path))
    code = main(["report", str(run.path)])
    err = capsys.readouterr().err
    assert "this is a bug" not in err
    assert code in (0, 2)
    assert run.report.exists() == (code == 0)
    if code == 0:
        check_page(run.report)


def test_text_of_events_is_escaped(tmp_path: Path) -> None:
    run = a_run(tmp_path / "run", MANIFEST, reason=HOSTILE)
    assert main(["report", str(run.path)]) == 0
    check_page(run.report)
    assert "&lt;script&gt;" in run.report.read_text()


@pytest.mark.parametrize("scheduler", [HOSTILE, "../../other", "seer/../..", "", 3])
def test_a_row_of_a_comparison_names_no_other_place(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], scheduler: object
) -> None:
    run = a_run(tmp_path / "run", MANIFEST | {"command": "compare", "rows": [{"scheduler": scheduler}]})
    assert main(["report", str(run.path)]) == 2
    assert "run.json cannot be read" in capsys.readouterr().err


@pytest.mark.parametrize(("numbers", "code"), [({"speedup": 1.5}, 0), ({"speedup": HOSTILE}, 2), ({"tail_s": "1"}, 2)])
def test_numbers_of_a_comparison_are_numbers(tmp_path: Path, numbers: dict[str, Any], code: int) -> None:
    run = a_run(tmp_path / "run", MANIFEST | {"command": "compare", "rows": [{"scheduler": "seer"} | numbers]})
    a_run(run.path / "seer-0", MANIFEST)
    assert main(["report", str(run.path)]) == code


@pytest.mark.parametrize("name", ["step", "mode", "rollout_s", "tail_s", "on_policy", "mean_gap"])
def test_hostile_text_in_a_training_run_is_refused(tmp_path: Path, name: str) -> None:
    run = a_run(tmp_path / "train", MANIFEST | {"command": "train"})
    a_run(run.path / "step-000000", MANIFEST)
    line: dict[str, Any] = {
        "step": 0,
        "call": 0,
        "mode": "train",
        "rollout_s": 1.0,
        "since_last_s": None,
        "tail_s": 0.1,
    }
    line["on_policy"] = {"mean_gap": 0.1, "limit": 0.2, "mean_ratio": 1.0, "largest_gap": 0.1}
    (run.path / "trainer.jsonl").write_text('{"step": 1, "reward": 0.5}\n')
    (run.path / "rollouts.jsonl").write_text(json.dumps(line) + "\n")
    assert main(["report", str(run.path)]) == 0
    check_page(run.report)
    run.report.unlink()
    (line["on_policy"] if name == "mean_gap" else line)[name] = HOSTILE
    (run.path / "rollouts.jsonl").write_text(json.dumps(line) + "\n")
    assert main(["report", str(run.path)]) == 2
    assert not run.report.exists()
