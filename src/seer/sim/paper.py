# SPDX-License-Identifier: Apache-2.0
"""The simulator's numbers beside those of the paper's evaluation.

Every number is a `PaperCell`: what the paper measured, and the scheduler and measure that are compared with it. Costs
were fitted to what the paper measured on veRL: the cells marked `calibrated`, and its speculation on veRL (figure 11),
which is no cell here. docs/design/0002-simulator.md says what was fitted and what was assumed.

Studies (paper: arXiv 2511.14617 v3, OSDI '26)
    table 4        throughput over veRL as divided rollout, context and grouped speculation are added
    figure 7       throughput over veRL, groups of 8 and of 16
    figure 8       total and tail seconds, how much of veRL's tail is left, and when groups are complete
    context        how much of the oracles' throughput is reached without speculation
    first version  what the paper's first version states
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import as_completed
from dataclasses import dataclass
from functools import partial
from typing import Literal

from seer.machine.workers import worker_processes
from seer.metrics.summary import Summary
from seer.scheduling.registry import parse_scheduler
from seer.sim.cluster import Speculation, simulate
from seer.sim.intervals import mean_of
from seer.sim.paper_numbers import (
    CONTEXT_STUDY,
    FIGURE_7,
    FIGURE_8,
    FIRST_VERSION,
    PAPER_ORACLE_SHARE,
    TABLE_4,
    TAIL_CUT,
)
from seer.sim.workloads import PAPER, paper_workload

Study = Literal["table 4", "figure 7", "figure 8", "context", "first version"]
Measure = Literal[
    "speedup",
    "total_s",
    "tail_s",
    "tail_share",
    "oracle_share",
    "bar_share",
    "group_median_s",
    "group_p90_s",
    "group_last_s",
]
GROUP_MEASURES: tuple[Measure, ...] = ("group_median_s", "group_p90_s", "group_last_s")
SHARES: tuple[Measure, ...] = ("tail_share", "oracle_share", "bar_share")
"""Measures whose error is a difference, not a ratio."""

BASELINE = "verl-sync"
"""The scheduler that the paper's speedups are relative to."""
REFERENCES: dict[Measure, str] = {"oracle_share": "oracle", "bar_share": "seer-oracle"}
"""Measures relative to another scheduler than the baseline: the paper's oracle, which has fixed chunks, and `seer` with
true lengths, the bar for our order."""
RELATIVE_GOAL = 0.10
"""Relative error within which a number of the paper counts as matched."""
SHARE_GOAL = 0.08
"""Difference within which a share counts as matched. Tail seconds count as a share of the paper's veRL tail."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Job:
    """One simulation that cells need."""

    workload: str
    group_size: int
    scheduler: str
    speculation: Speculation = "auto"
    seed: int = 0
    shrink: int = 1
    """Divides instances and groups alike."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PaperCell:
    """A number of the paper, and what is compared with it."""

    study: Study
    workload: str
    group_size: int
    row: str
    """The paper's name for it."""
    scheduler: str
    measure: Measure
    paper: float | None
    """None where the paper has no such number."""
    speculation: Speculation = "auto"
    calibrated: bool = False
    stated: str = ""
    """What the paper states where it gives a range over its workloads."""

    def jobs(self, seed: int, shrink: int = 1) -> tuple[Job, Job]:
        """Its simulation, and the one that it is relative to."""
        reference = REFERENCES.get(self.measure, BASELINE)

        def job(scheduler: str) -> Job:
            # Without drafts the simulation is the same with speculation on and off: run it once.
            drafts = parse_scheduler(scheduler).drafts != "none"
            return Job(
                workload=self.workload,
                group_size=self.group_size,
                scheduler=scheduler,
                speculation=self.speculation if drafts else "off",
                seed=seed,
                shrink=shrink,
            )

        return job(self.scheduler), job(reference)


@dataclass(frozen=True, slots=True, kw_only=True)
class CellResult:
    """Our number for a cell: the mean over the seeds, half of its 95% interval, and the range."""

    claim: PaperCell
    ours: float
    half_width: float
    lowest: float
    highest: float
    error: float | None
    """Relative for speedups and seconds, a difference for shares. None where the paper has no number."""
    within_goal: bool | None
    """None where this cell has no goal."""


WORKLOADS = tuple(PAPER)
"""In the order of the paper's columns."""


def claims() -> list[PaperCell]:
    """Every number of the paper that the simulator can compute."""
    return [*_table_4(), *_figure_7(), *_figure_8(), *_context(), *_first_version()]


def _cell(
    study: Study,
    workload: str,
    row: str,
    scheduler: str,
    measure: Measure,
    *,
    paper: float | None = None,
    group_size: int | None = None,
    speculation: Speculation = "auto",
    calibrated: bool = False,
    stated: str = "",
) -> PaperCell:
    """A cell whose groups are of the workload's own size, unless the study says otherwise."""
    return PaperCell(
        study=study,
        workload=workload,
        group_size=group_size or PAPER[workload].group_size,
        row=row,
        scheduler=scheduler,
        measure=measure,
        paper=paper,
        speculation=speculation,
        calibrated=calibrated,
        stated=stated,
    )


def _table_4() -> Iterable[PaperCell]:
    for row, (scheduler, values) in TABLE_4.items():
        for workload, paper in zip(WORKLOADS, values, strict=True):
            yield _cell("table 4", workload, row, scheduler, "speedup", paper=paper)


def _figure_7() -> Iterable[PaperCell]:
    for row, (scheduler, by_size) in FIGURE_7.items():
        for group_size, values in by_size.items():
            for workload, paper in zip(WORKLOADS, values, strict=True):
                yield _cell("figure 7", workload, row, scheduler, "speedup", paper=paper, group_size=group_size)


def _figure_8() -> Iterable[PaperCell]:
    cell = partial(_cell, "figure 8")
    for workload in WORKLOADS:
        total_s, tail_s = FIGURE_8[workload]["veRL"]
        yield cell(workload, "veRL", BASELINE, "total_s", paper=total_s, calibrated=True)
        yield cell(workload, "veRL", BASELINE, "tail_s", paper=tail_s, calibrated=True)
        total_s, tail_s = FIGURE_8[workload]["Seer"]
        yield cell(workload, "Seer", "seer-paper", "total_s", paper=total_s)
        yield cell(workload, "Seer", "seer-paper", "tail_s", paper=tail_s)
        yield cell(workload, "Seer", "seer-paper", "tail_share", paper=round(1.0 - TAIL_CUT[workload], 2))
        yield cell(workload, "ours", "seer", "total_s")
        yield cell(workload, "ours", "seer", "tail_s")
        yield cell(workload, "ours", "seer", "tail_share")
        for row, scheduler in (("veRL", BASELINE), ("Seer", "seer-paper"), ("ours", "seer")):
            for measure in GROUP_MEASURES:
                yield cell(workload, row, scheduler, measure)


def _first_version() -> Iterable[PaperCell]:
    for row, (scheduler, measure, stated) in FIRST_VERSION.items():
        for workload in WORKLOADS:
            yield _cell("first version", workload, row, scheduler, measure, stated=stated)


def _context() -> Iterable[PaperCell]:
    cell = partial(_cell, "context", speculation="off")
    for workload in WORKLOADS:
        measured = workload == "qwen2-vl-72b"
        for row, (scheduler, speedup, tail_share) in {**CONTEXT_STUDY, "ours": ("seer", None, None)}.items():
            yield cell(workload, row, scheduler, "speedup", paper=speedup if measured else None)
            yield cell(workload, row, scheduler, "tail_share", paper=tail_share if measured else None)
            if scheduler != "oracle":
                share = PAPER_ORACLE_SHARE if measured and scheduler == "context" else None
                yield cell(workload, row, scheduler, "oracle_share", paper=share)
        yield cell(workload, "ours", "seer", "bar_share")


def run_jobs(
    jobs: Iterable[Job], *, num_processes: int = 1, progress: Callable[[Job], None] | None = None
) -> dict[Job, Summary]:
    """Simulate each job once."""
    unique = list(dict.fromkeys(jobs))
    results: dict[Job, Summary] = {}

    def note(job: Job, summary: Summary) -> None:
        results[job] = summary
        if progress is not None:
            progress(job)

    if num_processes == 1:
        for job in unique:
            note(job, _simulate(job))
        return results
    with worker_processes(num_processes) as pool:
        futures = {pool.submit(_simulate, job): job for job in unique}
        for future in as_completed(futures):
            note(futures[future], future.result())
    return results


def _simulate(job: Job) -> Summary:
    workload = paper_workload(job.workload, seed=job.seed, group_size=job.group_size, shrink=job.shrink)
    return simulate(workload, job.scheduler, speculation=job.speculation).summary


def answer(claim: PaperCell, results: Mapping[Job, Summary], seeds: Sequence[int], shrink: int = 1) -> CellResult:
    """Our number for a cell, from its simulations."""
    values = [_value(claim, *(results[job] for job in claim.jobs(seed, shrink))) for seed in seeds]
    ours, half_width = mean_of(values)
    error = None
    if claim.paper is not None:
        error = ours - claim.paper if claim.measure in SHARES else ours / claim.paper - 1.0
    return CellResult(
        claim=claim,
        ours=ours,
        half_width=half_width,
        lowest=min(values),
        highest=max(values),
        error=error,
        within_goal=_within_goal(claim, ours, error),
    )


def _value(claim: PaperCell, run: Summary, reference: Summary) -> float:
    if claim.measure == "total_s":
        return run.makespan_s
    if claim.measure == "tail_s" or claim.measure in GROUP_MEASURES:
        return float(getattr(run, claim.measure))
    if claim.measure == "tail_share":
        return run.tail_s / reference.tail_s if reference.tail_s else 0.0
    return run.throughput_tokens_s / reference.throughput_tokens_s


def _within_goal(claim: PaperCell, ours: float, error: float | None) -> bool | None:
    if error is None or claim.paper is None or claim.calibrated:
        return None
    if claim.measure == "tail_s":
        _, verl_tail_s = FIGURE_8[claim.workload]["veRL"]
        return abs(ours - claim.paper) <= SHARE_GOAL * verl_tail_s
    return abs(error) <= (SHARE_GOAL if claim.measure in SHARES else RELATIVE_GOAL)
