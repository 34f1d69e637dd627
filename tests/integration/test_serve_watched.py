# SPDX-License-Identifier: Apache-2.0
"""Looking at a server and at a rollout: /metrics with Prometheus's tools, the live page in a browser, `seer top`."""

from __future__ import annotations

import contextlib
import json
import shutil
import socket
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("fastapi")
parser = pytest.importorskip("prometheus_client.parser")

import httpx
import numpy as np

from browser_page import CHROMIUM, QUIET, a_browser_page
from commands import DEADLINE_S, a_command, wait_until
from seer import ConfigError, Sampling, SyncRollout
from seer.cli.main import main
from seer.metrics.events import Ended, Event
from serve_process import ServeProcess, a_serve_process

PROMTOOL, PROMETHEUS = shutil.which("promtool"), shutil.which("prometheus")
FAKE = ("--engine", "fake", "--model", "none", "--instances", "2", "--no-pin")
SLOW = ("--set", "rollout.engine_settings.step_s=0.005")
ROOT = Path(__file__).parents[2]


@pytest.fixture(scope="module")
def server() -> Iterator[ServeProcess]:
    with a_serve_process(*FAKE, *SLOW) as served:
        body = {"prompt": [[i, 2] for i in range(1, 5)], "n": 4, "max_tokens": 40, "seed": 3}
        assert httpx.post(f"{served.url}/v1/completions", json=body, timeout=60).status_code == 200
        yield served


def samples(text: str) -> dict[tuple[str, tuple[tuple[str, str], ...]], float]:
    families = parser.text_string_to_metric_families(text)
    return {(one.name, tuple(sorted(one.labels.items()))): one.value for family in families for one in family.samples}


def test_metrics_are_read_by_the_client_library(server: ServeProcess) -> None:
    response = httpx.get(f"{server.url}/metrics")
    assert response.headers["content-type"].startswith("text/plain")
    found = samples(response.text)
    ended = {key: value for key, value in found.items() if key[0] == "seer:request_success_total"}
    assert sum(ended.values()) == 16
    assert found["seer:e2e_request_latency_seconds_count", ()] == 16
    tokens = sum(value for (name, _), value in found.items() if name == "seer:generation_tokens_total")
    assert tokens == found["seer:request_generation_tokens_sum", ()] > 16
    assert [found["seer:instance_up", (("engine", str(i)),)] for i in range(2)] == [1, 1]
    assert found["seer:num_requests", (("state", "running"),)] == 0


@pytest.mark.skipif(PROMTOOL is None, reason="needs promtool, of Debian's package prometheus")
def test_promtool_passes_and_of_the_names_of_vllm_it_minds_the_colon_alone(server: ServeProcess) -> None:
    def check_metrics(query: str) -> subprocess.CompletedProcess[str]:
        assert PROMTOOL is not None
        text = httpx.get(f"{server.url}/metrics{query}").raise_for_status().text
        return subprocess.run([PROMTOOL, "check", "metrics"], input=text, capture_output=True, text=True, check=False)

    passed = check_metrics("?names=underscore")
    assert (passed.returncode, passed.stdout, passed.stderr) == (0, "", "")
    complaints = check_metrics("").stderr.splitlines()
    assert all(line.endswith("metric names should not contain ':'") for line in complaints), complaints
    assert httpx.get(f"{server.url}/metrics?names=camel").status_code == 400


def test_both_kinds_of_names_have_the_same_numbers(server: ServeProcess) -> None:
    colon, underscore = (samples(httpx.get(f"{server.url}/metrics{query}").text) for query in ("", "?names=underscore"))
    assert {name.replace("seer:", "seer_") for name, _ in colon} == {name for name, _ in underscore}
    assert not any(":" in name for name, _ in underscore)
    assert underscore["seer_e2e_request_latency_seconds_count", ()] == 16


@contextlib.contextmanager
def a_prometheus(server: ServeProcess, folder: Path) -> Iterator[str]:
    """Scrapes the server with the settings that Prometheus starts with; gives its address."""
    assert PROMETHEUS is not None
    with socket.socket() as one:
        one.bind(("127.0.0.1", 0))
        address = f"127.0.0.1:{one.getsockname()[1]}"
    target = server.url.removeprefix("http://")
    (folder / "p.yml").write_text(
        f"scrape_configs:\n- job_name: seer\n  scrape_interval: 1s\n  static_configs: [{{targets: ['{target}']}}]\n"
    )
    process = subprocess.Popen(
        [
            *(PROMETHEUS, f"--config.file={folder}/p.yml", f"--storage.tsdb.path={folder}/data"),
            *(f"--web.listen-address={address}", "--log.level=error"),
        ],
    )
    try:
        yield address
    finally:
        process.terminate()
        process.wait(60)


def ask(address: str, query: str) -> list[Any]:
    """What Prometheus answers to a query that it understands; nothing while it starts."""
    try:
        reply = httpx.get(f"http://{address}/api/v1/query", params={"query": query})
    except httpx.TransportError:
        return []
    if reply.status_code == 503:
        return []
    value = reply.json()
    assert value["status"] == "success", (query, value)
    found: list[Any] = value["data"]["result"]
    return found


def dashboard_queries() -> list[str]:
    dashboard = json.loads((ROOT / "examples" / "grafana" / "seer.json").read_text())
    return [target["expr"] for panel in dashboard["panels"] for target in panel.get("targets", ())]


@pytest.mark.skipif(PROMETHEUS is None, reason="needs Debian's package prometheus")
def test_a_real_prometheus_scrapes_the_server_and_answers_every_query_of_the_dashboard(
    server: ServeProcess, tmp_path: Path
) -> None:
    with a_prometheus(server, tmp_path) as address:
        query = "sum(seer:request_success_total)"
        wait_until(lambda: bool(ask(address, query)), "Prometheus scraped nothing")
        assert ask(address, query)[0]["value"][1] == "16"
        [rate] = [one for one in dashboard_queries() if "rate(seer:generation_tokens_total" in one]
        wait_until(lambda: bool(ask(address, rate)), "Prometheus scraped once")
        answers = {one: ask(address, one) for one in dashboard_queries()}
    for one in (rate, "seer:kv_cache_usage_perc"):  # a line for each instance, not one for the address of them all
        assert sorted(series["metric"].get("engine") for series in answers[one]) == ["0", "1"]


def test_the_dashboard_asks_only_for_metrics_that_exist(server: ServeProcess) -> None:
    names = {name for name, _ in samples(httpx.get(f"{server.url}/metrics").text)}
    text = httpx.get(f"{server.url}/metrics").text
    declared = {line.split()[2] for line in text.splitlines() if line.startswith("# TYPE")}
    asked = {
        word
        for query in dashboard_queries()
        for word in query.replace("(", " ").replace("{", " ").replace("[", " ").split()
        if word.startswith("seer:")
    }
    assert asked
    for name in asked:
        base = name.removesuffix("_bucket").removesuffix("_total")
        assert name in names or base in declared or name in declared, name


def browse(url: str, home: Path, *words: str) -> subprocess.CompletedProcess[str]:
    """A page in a real browser without a window."""
    assert CHROMIUM is not None
    command = [CHROMIUM, *QUIET, f"--user-data-dir={home}/chromium", "--enable-logging=stderr", "--v=0", *words, url]
    return subprocess.run(command, capture_output=True, text=True, timeout=120, check=True)


def num_hues(screenshot: Path) -> int:
    """Colours of a picture that are neither grey nor rare, in steps of a sixteenth of the circle."""
    image = pytest.importorskip("PIL.Image")
    hue, saturation, _ = np.moveaxis(np.asarray(image.open(screenshot).convert("HSV")), 2, 0)
    counts = np.bincount(hue[saturation > 100] // 16, minlength=16)
    return int((counts > 40).sum())


@pytest.mark.skipif(CHROMIUM is None, reason="needs the system package chromium")
def test_the_live_page_is_drawn_by_a_real_browser_while_requests_run(server: ServeProcess, tmp_path: Path) -> None:
    body = {"prompt": [[i, 2] for i in range(1, 9)], "n": 4, "max_tokens": 4000, "ignore_eos": True, "stream": True}
    with httpx.stream("POST", f"{server.url}/v1/completions", json=body, timeout=120):
        shown = browse(f"{server.url}/", tmp_path, f"--screenshot={tmp_path}/page.png")
        page = browse(f"{server.url}/", tmp_path, "--dump-dom")
    assert "CONSOLE" not in shown.stderr  # no complaint of the page itself
    assert num_hues(tmp_path / "page.png") >= 4  # each group's chunks have a colour of their own
    assert "seer serve: none" in page.stdout
    assert "chunks in the last 60 s" in page.stdout
    assert page.stdout.count("<td>up</td>") + page.stdout.count('<td class="">up</td>') == 2


SHOWN = """Object.fromEntries([...document.querySelectorAll("#numbers div")].map(
    box => [box.children[0].textContent, box.children[1].textContent]))"""
TEXT = 'document.getElementById("%s").textContent'


@pytest.mark.skipif(CHROMIUM is None, reason="needs the system package chromium")
def test_the_live_page_moves_with_its_events_and_is_used_without_a_mouse_or_eyes(
    server: ServeProcess, tmp_path: Path
) -> None:
    body = {"prompt": [[i, 2] for i in range(1, 9)], "n": 4, "max_tokens": 4000, "ignore_eos": True, "stream": True}
    with contextlib.ExitStack() as stack:
        page = stack.enter_context(a_browser_page(f"{server.url}/", tmp_path))
        wait_until(lambda: page.evaluate(SHOWN).get("running") is not None, "the page shows nothing")
        first = page.evaluate(SHOWN)["tokens"]  # of the state that came with the page
        stack.enter_context(httpx.stream("POST", f"{server.url}/v1/completions", json=body, timeout=120))
        wait_until(lambda: page.evaluate(SHOWN)["tokens"] != first, "the page does not move")
        [button] = page.accessible("button")
        assert (button["name"], button["pressed"]) == ("Freeze", "false")
        page.press(" ")
        [button] = page.accessible("button")
        assert (button["name"], button["pressed"]) == ("Go on", "true")
        page.press("-")
        assert "chunks in the last 120 s" in page.evaluate(TEXT % "timeline-text")
        page.press(" ")
        frozen = page.evaluate(SHOWN)["tokens"]
        wait_until(lambda: page.evaluate(SHOWN)["tokens"] != frozen, "the page does not go on")
        [timeline] = page.accessible("image")
        assert timeline["name"] == "Who runs where"
        assert "chunks in the last" in timeline["description"]
        assert timeline["focusable"]
        [status] = page.accessible("status")
        assert status["live"] == "polite"
        assert page.evaluate(TEXT % "status").startswith("Connected.")


def test_top_prints_one_state(server: ServeProcess, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["top", server.url, "--once"]) == 0
    assert "0 failed" in capsys.readouterr().out
    assert main(["top", server.url, "--once", "--json"]) == 0
    state = json.loads(capsys.readouterr().out)
    assert state["ended"].keys() <= {"stop", "length", "cancelled"}
    assert sum(state["ended"].values()) >= 16
    assert len(state["instances"]) == 2
    assert main(["top", "http://127.0.0.1:9", "--once"]) == 1


@contextlib.contextmanager
def a_watched_rollout(folder: Path, *words: str) -> Iterator[str]:
    """A rollout that runs; gives the address of its page."""
    prompts = folder / "p.jsonl"
    prompts.write_text("".join(json.dumps({"prompt_token_ids": [i, 2]}) + "\n" for i in range(1, 9)))
    asked = ("rollout", "--prompts", str(prompts), "--n", "4", "--max-tokens", "4000", "--ignore-eos")
    process = a_command(*asked, *FAKE, *SLOW, "--run-dir", str(folder / "run"), *words)
    try:
        assert process.stderr is not None
        yield process.stderr.readline().split()[2].rstrip(",")
    finally:
        process.terminate()
        process.communicate(timeout=DEADLINE_S)


def test_a_rollout_can_be_watched(tmp_path: Path) -> None:
    with a_watched_rollout(tmp_path, "--metrics-port", "0") as url:
        found = samples(httpx.get(f"{url.rstrip('/')}/metrics").text)
        assert found["seer:instance_up", (("engine", "0"),)] == 1
        assert "Who runs where" in httpx.get(url).text
        assert httpx.get(url, headers={"Host": "evil.example"}).status_code == 403


def test_a_trainer_serves_the_numbers_of_all_its_steps_from_its_own_process(tmp_path: Path) -> None:
    num_tokens, seen = 0, list[Event]()
    with SyncRollout("none", engine="fake", instances=2) as rollout:
        with pytest.raises(ConfigError, match="port"):
            rollout.serve_metrics(70_000)
        url = rollout.serve_metrics()
        for step in range(2):
            sampling = Sampling(max_tokens=20)
            groups = list(rollout.run([[1, 2], [3]], n=3, sampling=sampling, seed=step, events=seen.append))
            num_tokens += sum(len(one.token_ids) for group in groups for one in group.responses)
            rollout.update_weights(tmp_path)
        found = samples(httpx.get(f"{url}/metrics").text)
        ended = [value for (name, _), value in found.items() if name == "seer:request_success_total"]
        assert sum(ended) == 12 == sum(isinstance(event, Ended) for event in seen)  # for its own sink, too
        tokens = [value for (name, _), value in found.items() if name == "seer:generation_tokens_total"]
        assert sum(tokens) == num_tokens
        assert found["seer:weights_version", ()] == 2
        assert "Who runs where" in httpx.get(url).text
    with pytest.raises(httpx.TransportError):
        httpx.get(url)


@pytest.mark.skipif(CHROMIUM is None, reason="needs the system package chromium")
def test_the_live_page_of_a_rollout_shows_who_runs_where(tmp_path: Path) -> None:
    with a_watched_rollout(tmp_path, "--watch") as url:
        browse(url, tmp_path, f"--screenshot={tmp_path}/page.png")
    assert num_hues(tmp_path / "page.png") >= 4
