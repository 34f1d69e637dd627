# SPDX-License-Identifier: Apache-2.0
"""The paper's numbers and how ours are held against them; the simulations themselves are `seer paper`."""

import json

import pytest

from seer.cli import paper as verb
from seer.cli.main import main
from seer.metrics.summary import Summary
from seer.sim import paper
from seer.sim.paper import Job, PaperCell, answer, claims
from seer.sim.paper_numbers import FIGURE_8, TAIL_CUT
from seer.sim.workloads import PAPER


def a_summary(*, tokens_s: float, total_s: float = 100.0, tail_s: float = 10.0) -> Summary:
    return Summary(
        num_requests=1,
        num_tokens=1,
        cancelled_tokens=0,
        makespan_s=total_s,
        throughput_tokens_s=tokens_s,
        tail_s=tail_s,
        preemptions=0,
        recomputed_tokens=0,
        migrations=0,
        migrated_tokens=0,
        idle_share=0.0,
        mean_accepted=1.0,
        group_median_s=1.0,
        group_p90_s=1.0,
        group_last_s=1.0,
    )


def test_only_verls_own_seconds_are_calibrated() -> None:
    calibrated = [claim for claim in claims() if claim.calibrated]
    assert {(claim.row, claim.measure) for claim in calibrated} == {("veRL", "total_s"), ("veRL", "tail_s")}
    assert len(calibrated) == 2 * 3


def test_the_papers_numbers_agree_with_each_other() -> None:
    by_key = {(c.study, c.workload, c.group_size, c.row, c.measure): c.paper for c in claims()}
    for workload, rows in FIGURE_8.items():
        (verl_s, verl_tail_s), (seer_s, seer_tail_s) = rows["veRL"], rows["Seer"]
        size = PAPER[workload].group_size
        figure_7 = by_key["figure 7", workload, size, "Seer", "speedup"]
        assert verl_s / seer_s == pytest.approx(figure_7, rel=0.02)  # same lengths: throughput is time
        assert 1 - seer_tail_s / verl_tail_s == pytest.approx(TAIL_CUT[workload], abs=0.02)


def test_an_answer_is_the_mean_over_seeds_with_its_error() -> None:
    claim = next(c for c in claims() if c.row == "+ divided rollout" and c.workload == "moonlight")
    results: dict[Job, Summary] = {}
    for seed, speedup in ((0, 1.3), (1, 1.5)):
        run, reference = claim.jobs(seed)
        results |= {run: a_summary(tokens_s=100 * speedup), reference: a_summary(tokens_s=100)}
    got = answer(claim, results, [0, 1])
    assert [got.ours, got.lowest, got.highest] == pytest.approx([1.4, 1.3, 1.5])
    assert got.error == pytest.approx(1.4 / 1.41 - 1)
    assert got.within_goal is True


@pytest.mark.parametrize(
    ("ours", "within"), [(1.41 * 1.09, True), (1.41 * 1.11, False), (1.41 * 0.89, False), (1.41 * 0.91, True)]
)
def test_table_4_is_met_within_ten_percent(ours: float, within: bool) -> None:
    claim = next(c for c in claims() if c.row == "+ divided rollout" and c.workload == "moonlight")
    run, reference = claim.jobs(0)
    results = {run: a_summary(tokens_s=ours), reference: a_summary(tokens_s=1.0)}
    assert answer(claim, results, [0]).within_goal is within


def test_a_tail_is_compared_as_what_is_left_of_verls() -> None:
    claim = next(c for c in claims() if c.measure == "tail_share" and c.row == "Seer" and c.workload == "moonlight")
    run, reference = claim.jobs(0)
    results = {run: a_summary(tokens_s=1.0, tail_s=20.0), reference: a_summary(tokens_s=1.0, tail_s=100.0)}
    got = answer(claim, results, [0])
    assert got.ours == pytest.approx(0.2)
    assert got.error == pytest.approx(0.04)
    assert got.within_goal is True


def test_schedulers_that_never_draft_are_simulated_once() -> None:
    jobs = {job for claim in claims() for job in claim.jobs(0)}
    assert len([job for job in jobs if job.scheduler == "verl-sync" and job.group_size == 8]) == len(paper.WORKLOADS)


def fake_run(jobs: list[Job], **_: object) -> dict[Job, Summary]:
    return {job: a_summary(tokens_s=1.0 + len(job.scheduler)) for job in jobs}


def test_the_verb_prints_every_study_and_says_what_was_calibrated(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(verb, "run_jobs", fake_run)
    assert main(["paper"]) == 0
    out = capsys.readouterr().out
    for title in verb.TITLES.values():
        assert title.split(":")[0] in out
    assert "Calibrated: veRL's total and tail seconds" in out


def test_the_verb_prints_json_cells(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr(verb, "run_jobs", fake_run)
    assert main(["paper", "--json", "--seeds", "0,1"]) == 0
    cells = json.loads(capsys.readouterr().out)
    assert len(cells) == len(claims())
    assert {"study", "row", "scheduler", "paper", "ours", "error", "calibrated", "within_goal"} <= set(cells[0])


@pytest.mark.parametrize("arguments", [["--seeds", "x"], ["--seeds", "-1"]])
def test_invalid_arguments_are_refused(arguments: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["paper", *arguments]) == 2
    assert "hint:" in capsys.readouterr().err


def test_a_number_of_processes_out_of_range_is_refused(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        main(["paper", "--processes", "0"])
    assert ended.value.code == 2
    assert "1 to 1,024" in capsys.readouterr().err


def test_a_claim_of_the_oracle_is_relative_to_the_oracle() -> None:
    claim = PaperCell(
        study="context",
        workload="kimi-k2",
        group_size=8,
        row="ours",
        scheduler="seer",
        measure="oracle_share",
        paper=None,
        speculation="off",
    )
    assert [job.scheduler for job in claim.jobs(0)] == ["seer", "oracle"]


def test_tail_seconds_are_matched_within_eight_points_of_verls_tail() -> None:
    claim = next(c for c in claims() if c.row == "Seer" and c.measure == "tail_s" and c.workload == "moonlight")
    run, reference = claim.jobs(0)
    for tail_s, within in ((278.0 + 145.0, True), (278.0 + 146.0, False)):
        results = {run: a_summary(tokens_s=1.0, tail_s=tail_s), reference: a_summary(tokens_s=1.0)}
        assert answer(claim, results, [0]).within_goal is within


def test_49_numbers_of_the_paper_have_a_goal() -> None:
    assert len([claim for claim in claims() if claim.paper is not None and not claim.calibrated]) == 49


def test_our_order_is_measured_against_true_lengths_with_its_own_chunks() -> None:
    bars = [claim for claim in claims() if claim.measure == "bar_share"]
    assert {(claim.workload, claim.jobs(0)[1].scheduler) for claim in bars} == {
        (workload, "seer-oracle") for workload in paper.WORKLOADS
    }
