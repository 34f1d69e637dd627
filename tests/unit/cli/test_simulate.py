# SPDX-License-Identifier: Apache-2.0
"""`seer simulate` and `seer replay`, end to end on a workload of a second."""

import json
from functools import partial
from pathlib import Path

import pytest

from seer.cli import simulate_iterations
from seer.cli.main import main
from seer.cli.simulate import DEFAULT_SCHEDULERS
from seer.sim.intervals import mean_of
from seer.sim.iterations import iterate

SMALL = ["simulate", "synthetic", "--groups", "10", "--group-size", "4", "--mean", "300", "--max", "2000"]
PROMISED = {
    "workload",
    "scheduler",
    "group_size",
    "seed",
    "throughput_tokens_s",
    "makespan_s",
    "tail_s",
    "group_median_s",
    "group_p90_s",
    "group_last_s",
    "preemptions",
    "recomputed_tokens",
    "migrations",
    "idle_share",
    "oracle_share",
    "mean_accepted",
    "simulator_wall_s",
}


def simulate_json(capsys: pytest.CaptureFixture[str], *words: str) -> list[dict[str, object]]:
    assert main([*SMALL, "--json", *words]) == 0
    rows: list[dict[str, object]] = json.loads(capsys.readouterr().out)
    return rows


def test_json_has_every_promised_key_and_one_object_per_scheduler(capsys: pytest.CaptureFixture[str]) -> None:
    rows = simulate_json(capsys)
    assert [row["scheduler"] for row in rows] == DEFAULT_SCHEDULERS.split(",")
    for row in rows:
        assert set(row) >= PROMISED
        assert all(row[key] is not None for key in PROMISED)


def test_the_same_seed_gives_the_same_bytes_but_for_the_wall_time(capsys: pytest.CaptureFixture[str]) -> None:
    def run(*words: str) -> str:
        assert main([*SMALL, "--json", "--no-timing", *words]) == 0
        return capsys.readouterr().out

    first = run("--seeds", "3")
    assert first == run("--seeds", "3")
    assert first != run("--seeds", "4")
    assert '"simulator_wall_s": null' in first


def test_the_oracles_share_of_itself_is_one(capsys: pytest.CaptureFixture[str]) -> None:
    (row,) = simulate_json(capsys, "--schedulers", "seer-oracle")
    assert row["oracle_share"] == 1.0


def test_speculation_off_accepts_nothing(capsys: pytest.CaptureFixture[str]) -> None:
    (with_drafts,) = simulate_json(capsys, "--schedulers", "seer")
    (without,) = simulate_json(capsys, "--schedulers", "seer", "--speculation", "off")
    assert float(str(with_drafts["mean_accepted"])) > 1.0
    assert without["mean_accepted"] == 1.0


def test_the_table_shows_ratios_to_the_first_and_labels_off_policy_rows(
    capsys: pytest.CaptureFixture[str],
) -> None:
    assert main([*SMALL, "--schedulers", "verl,partial"]) == 0
    out = capsys.readouterr().out
    assert "llama-8b on 8 instances of 1 x H200" in out
    rows = [[cell.strip() for cell in line.split("│")] for line in out.splitlines() if line.startswith("│")]
    assert rows[0][1:4:2] == ["verl", "1.00"]
    assert rows[1][1] == "partial (off-policy)"


def test_several_seeds_are_simulated_each_by_itself(capsys: pytest.CaptureFixture[str]) -> None:
    rows = simulate_json(capsys, "--schedulers", "verl,seer", "--seeds", "2..3,7", "--no-timing")
    assert [(row["seed"], row["scheduler"]) for row in rows] == [
        (seed, scheduler) for seed in (2, 3, 7) for scheduler in ("verl", "seer")
    ]
    assert rows[2:4] == simulate_json(capsys, "--schedulers", "verl,seer", "--seeds", "3", "--no-timing")


def test_the_table_of_several_seeds_shows_the_mean_and_the_range_of_ratios_of_equal_seeds(
    capsys: pytest.CaptureFixture[str],
) -> None:
    words = ["--schedulers", "verl,seer", "--seeds", "0..2"]
    rows = simulate_json(capsys, *words)
    rates = {(row["scheduler"], row["seed"]): float(str(row["throughput_tokens_s"])) for row in rows}
    ratios = [rates["seer", seed] / rates["verl", seed] for seed in range(3)]
    assert main([*SMALL, *words]) == 0
    out = capsys.readouterr().out
    assert "seeds 0, 1, 2" in out
    cells = [[cell.strip() for cell in line.split("│")] for line in out.splitlines() if line.startswith("│")]
    assert [row[3] for row in cells] == [
        "1.00 ±0.00",
        "1.00..1.00",
        "{:.2f} ±{:.2f}".format(*mean_of(ratios)),
        f"{min(ratios):.2f}..{max(ratios):.2f}",
    ]


@pytest.mark.parametrize(
    "words",
    [
        ["simulate", "nowhere"],
        [*SMALL, "--schedulers", "sear"],
        [*SMALL, "--schedulers", ""],
        [*SMALL, "--schedulers", "seer,seer"],
        [*SMALL, "--instances", "0"],
        [*SMALL, "--seeds", "one"],
        [*SMALL, "--seeds", "3..1"],
        [*SMALL, "--seeds", "0..1000000000000"],
        [*SMALL, "--seeds", "-1"],
        [*SMALL, "--seeds", "0,1", "--out", "somewhere"],
        [*SMALL[:2], "--group-size", "0"],
        [*SMALL[:2], "--max", "10000000"],
        ["simulate", "trace:missing.json"],
    ],
)
def test_what_cannot_be_simulated_is_one_line_a_hint_and_exit_code_2(
    words: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    try:
        code: object = main(words)
    except SystemExit as error:  # argparse's own refusals
        code = error.code
    captured = capsys.readouterr()
    assert (code, captured.out) == (2, "")
    assert [line.split(":")[0] for line in captured.err.splitlines()] == ["error", "hint"]


def test_out_keeps_results_events_traces_and_plots(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out = tmp_path / "runs" / "small"
    assert main([*SMALL, "--schedulers", "verl+sd,seer", "--json", "--out", str(out)]) == 0
    assert (out / "results.json").read_text() == capsys.readouterr().out
    assert "</svg>" in (out / "finish_times.svg").read_text()
    for scheduler in ("verl+sd", "seer"):
        assert {path.name for path in (out / scheduler).iterdir()} == {
            "events.jsonl",
            "trace.json",
            "load.svg",
            "instances.svg",
        }
    assert main(["replay", str(out / "seer" / "events.jsonl")]) == 0
    assert "the plan is the same" in capsys.readouterr().out
    assert main(["replay", str(out / "seer" / "events.jsonl"), "--scheduler", "verl"]) == 0


def test_a_replay_that_differs_says_where_and_fails(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main([*SMALL, "--schedulers", "verl", "--out", str(tmp_path)]) == 0
    log = tmp_path / "verl" / "events.jsonl"
    lines = log.read_text().splitlines(keepends=True)
    number = next(number for number, line in enumerate(lines) if '"started"' in line)
    lines[number] = lines[number].replace('"instance":0', '"instance":5')
    log.write_text("".join(lines))
    assert main(["replay", str(log)]) == 1
    assert "differs from chunk 0" in capsys.readouterr().out


def test_a_folder_that_cannot_be_made_is_refused_before_the_work(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "file").touch()
    assert main([*SMALL, "--out", str(tmp_path / "file")]) == 2
    assert "--out wants a folder" in capsys.readouterr().err


def test_iterations_are_simulated_in_a_row(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    words = ["simulate", "moonlight", "--schedulers", "verl-sync,seer", "--iterations", "2"]
    small = partial(iterate, shrink=16)
    monkeypatch.setattr(simulate_iterations, "iterate", small)
    assert main([*words, "--json"]) == 0
    rows = json.loads(capsys.readouterr().out)
    assert [(row["scheduler"], row["iteration"]) for row in rows] == [
        (scheduler, number) for scheduler in ("verl-sync", "seer") for number in (0, 1)
    ]
    assert all(row["rollout_s"] > row["tail_s"] > 0 and row["training_s"] > 0 for row in rows)
    assert main(words) == 0
    shown = capsys.readouterr().out
    assert "2 iterations" in shown
    assert "iteration x" in shown


@pytest.mark.parametrize(
    ("words", "named"),
    [
        (["synthetic"], "synthetic"),
        (["moonlight", "--seeds", "0..3"], "4 seeds"),
        (["moonlight", "--group-size", "4"], "--group-size"),
        (["moonlight", "--model", "llama-8b"], "model"),
    ],
)
def test_iterations_refuse_what_they_cannot_use(
    capsys: pytest.CaptureFixture[str], words: list[str], named: str
) -> None:
    assert main(["simulate", *words, "--iterations", "2"]) != 0
    assert named in capsys.readouterr().err
