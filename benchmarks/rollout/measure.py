# SPDX-License-Identifier: Apache-2.0
"""Runs of several schedulers on one fleet, measured and predicted; shared by cpu.py and gpu.py.

Every run starts with the weights loaded again under a new weights version, so it cannot use KV or drafts of an earlier
run. The runs of a repetition are interleaved. A scheduler named `NAME/off` runs without drafts. The file is written
after each run, with all numbers so far.
"""

from __future__ import annotations

import asyncio
import json
import statistics
import sys
import time
from collections.abc import Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from partings import Responses, compare
from seer import Rollout
from seer.analysis.comparison import order_of_runs
from seer.analysis.explain import explain
from seer.analysis.leases import report_leases
from seer.analysis.whatif import recorded_run, replay_under
from seer.metrics.events import Event
from seer.metrics.jsonl import EventLog
from seer.runs.prompts import EncodedPrompt
from turns import await_turn, end_turn

Lengths = Sequence[Sequence[int]]


class Ledger:
    """The file with the stamp and the numbers so far, and the time that is left."""

    def __init__(self, path: Path, limit_s: float, stamp: dict[str, Any]) -> None:
        self._path = path
        self._ends_s = time.monotonic() + limit_s
        self.content: dict[str, Any] = {"stamp": stamp, "runs": [], "skipped": []}
        path.parent.mkdir(parents=True, exist_ok=True)
        self.save()

    @property
    def left_s(self) -> float:
        return self._ends_s - time.monotonic()

    def save(self) -> None:
        self._path.write_text(json.dumps(self.content, indent=1) + "\n")

    def keep(self, name: str, events: Sequence[Event], about: dict[str, Any]) -> None:
        """Write a run's event log beside the numbers."""
        with EventLog(self._path.parent / f"events-{name}.jsonl", about) as log:
            for event in events:
                log(event)

    def keep_partings(self, name: str, first: Responses, other: Responses, prompts: Sequence[EncodedPrompt]) -> None:
        """Write where responses part from those of the first run, for ../vllm/near_ties.py."""
        found = compare(first, other, {group: prompt.token_ids for group, prompt in enumerate(prompts)})
        (self._path.parent / f"partings-{name}.json").write_text(json.dumps(found))

    def add(self, run: dict[str, Any]) -> None:
        self.content["runs"].append(run)
        self.save()

    def skip(self, what: str) -> None:
        print(f"skipped: {what}", flush=True)
        self.content["skipped"].append(what)
        self.save()


async def measure(
    rollout: Rollout,
    prompts: Sequence[EncodedPrompt],
    schedulers: Sequence[str],
    ledger: Ledger,
    *,
    label: dict[str, Any],
    repeat: int,
    seed: int = 0,
    lengths: Lengths | None = None,
    predict: bool = True,
    weights: Path | None = None,
    go: Path | None = None,
) -> Lengths:
    """Run every scheduler `repeat` times, interleaved; returns the lengths of the first run.

    With `go` each run waits for that file, and takes it away when it is over: fleets are measured in turns.
    """
    await _warm_up(rollout, prompts)
    first: dict[tuple[int, int], list[int]] = {}
    baseline: Responses = {}
    longest_s, max_tokens = 0.0, max(prompt.sampling.max_tokens for prompt in prompts)
    for repetition, scheduler in order_of_runs(list(schedulers), repeat):
        if ledger.left_s < 1.3 * longest_s + 10:
            ledger.skip(f"{label}, {scheduler}, repetition {repetition}")
            continue
        await asyncio.to_thread(await_turn, go, ledger.left_s)
        began_s = time.monotonic()
        weights = weights or rollout.engine.model_dir
        assert weights is not None
        await rollout.update_weights(weights)
        events: list[Event] = []
        cpu_s = time.process_time()
        groups = [
            g
            async for g in rollout.run(
                prompts,
                scheduler=scheduler.removesuffix("/off"),
                speculation="off" if scheduler.endswith("/off") else None,
                seed=seed,
                lengths=lengths,
                events=events.append,
            )
        ]
        cpu_s = time.process_time() - cpu_s  # of the driver: instances are processes of their own
        tokens = {(r.group, r.index): r.token_ids for group in groups for r in group.responses}
        first = first or tokens
        different = sum(tokens[key] != ids for key, ids in first.items())
        # In a thread of its own: the simulator has an event loop, and a thread has but one.
        numbers = await asyncio.to_thread(
            _numbers, rollout, scheduler, events, max_tokens=max_tokens, different=different, predict=predict
        )
        assert rollout.summary is not None
        numbers["driver_cores"] = cpu_s / rollout.summary.makespan_s
        ledger.add(label | {"repetition": repetition} | numbers)
        name = f"{len(rollout.fleet.instances)}-{scheduler.replace('/', '-')}-{repetition}"
        limits = asdict(rollout.fleet.instances[0].limits)
        facts = limits | {"kv_tokens": rollout.fleet.instances[0].limits.kv_tokens, "max_tokens": max_tokens}
        ledger.keep(name, events, label | facts | {"scheduler": scheduler})
        responses = {(one.group, one.index): one for group in groups for one in group.responses}
        baseline = baseline or responses
        ledger.keep_partings(name, baseline, responses, prompts)
        _say(ledger.content["runs"][-1])
        longest_s = max(longest_s, time.monotonic() - began_s)
        end_turn(go)
    return [[len(first[(g, i)]) for i in range(prompt.n)] for g, prompt in enumerate(prompts)] if first else []


async def _warm_up(rollout: Rollout, prompts: Sequence[EncodedPrompt]) -> None:
    few = [replace(p, sampling=replace(p.sampling, max_tokens=8, min_tokens=0), n=2) for p in prompts[:8]]
    async for _ in rollout.run(few, scheduler="verl"):
        pass


def _numbers(
    rollout: Rollout, scheduler: str, events: Sequence[Event], *, max_tokens: int, different: int, predict: bool
) -> dict[str, Any]:
    """The numbers of a run, where its time went, and what the simulator predicts from its lengths and step costs."""
    limits = rollout.fleet.instances[0].limits
    summary = rollout.summary
    assert summary is not None
    found = explain(events, max_num_seqs=[one.limits.max_num_seqs for one in rollout.fleet.instances])
    numbers: dict[str, Any] = {"scheduler": scheduler, "summary": asdict(summary), "different_responses": different}
    numbers["leases"] = asdict(report_leases(events, kv_tokens=limits.kv_tokens))
    if found is not None and found.step is not None:
        numbers |= {
            "seconds": found.seconds,
            "oracle_s": found.oracle_s,
            "step_ms": [1e3 * found.step.base_s, 1e3 * found.step.slope_s],
            "drafted": found.num_drafted,
            "accepted": found.num_accepted,
        }
        if not predict:
            return numbers
        recorded = recorded_run(
            events,
            scheduler=scheduler.removesuffix("/off"),
            limits=rollout.fleet.limits,
            max_tokens=max_tokens,
            chunk_tokens=None,
        )
        predicted = replay_under(recorded, recorded.scheduler)
        numbers["predicted"] = asdict(predicted)
        numbers["prediction_error"] = predicted.makespan_s / summary.makespan_s - 1
    return numbers


def _say(run: dict[str, Any]) -> None:
    summary = run["summary"]
    error = run.get("prediction_error")
    predicted = f", predicted {100 * error:+.0f}%" if error is not None else ""
    print(
        f"{run['scheduler']:<10} {summary['throughput_tokens_s']:9.1f} tokens/s {summary['makespan_s']:7.1f} s, "
        f"tail {summary['tail_s']:.1f} s, {summary['preemptions']} preemptions{predicted}{_leases(run['leases'])}, "
        f"driver {run['driver_cores']:.0%} of a core",
        flush=True,
    )


def _leases(leases: dict[str, Any]) -> str:
    use = f", {leases['kv_use']:.0%} of KV in use while any waits" if leases["kv_use"] is not None else ""
    return (
        f", {leases['num_chunks']} chunks, {leases['num_extended']} extensions ({leases['num_late']} late, "
        f"p99 gap {1e3 * leases['p99_gap_s']:.1f} ms), {leases['num_parked']} parked{use}"
    )


def table(runs: Sequence[dict[str, Any]], schedulers: Sequence[str]) -> str:
    """One row per scheduler, medians over its repetitions; the first scheduler is what speedups are relative to."""
    of = {p: [run for run in runs if run["scheduler"] == p] for p in schedulers}
    of = {p: found for p, found in of.items() if found}
    if not of:
        return "(nothing was run)\n"

    def median(scheduler: str, *path: str) -> float | None:
        values: list[float] = []
        for run in of[scheduler]:
            value: Any = run
            for key in path:
                value = value.get(key) if isinstance(value, dict) else None
            if value is not None:
                values.append(float(value))
        return statistics.median(values) if values else None

    base = median(next(iter(of)), "summary", "throughput_tokens_s") or 1.0
    base_tail = median(next(iter(of)), "summary", "tail_s") or 1.0
    lines = [
        "| scheduler | tokens/s | spread | x | total s | tail s | tail cut | idle | preempted | migrated "
        "| drafts accepted | oracle estimate | simulator | tokens |",
        "|---|---|---|---|---|---|---|---|---|---|---|---|---|---|",
    ]
    for scheduler, found in of.items():
        rates = [run["summary"]["throughput_tokens_s"] for run in found]
        makespan = median(scheduler, "summary", "makespan_s") or 1.0
        tail = median(scheduler, "summary", "tail_s") or 0.0
        oracle, error = median(scheduler, "oracle_s"), median(scheduler, "prediction_error")
        drafted, accepted = median(scheduler, "drafted") or 0, median(scheduler, "accepted") or 0
        different = max(run["different_responses"] for run in found)
        cells = [
            f"`{scheduler}`",
            f"{statistics.median(rates):,.1f}",
            f"{min(rates):,.1f} to {max(rates):,.1f}",
            f"{statistics.median(rates) / base:.2f}",
            f"{makespan:.1f}",
            f"{tail:.1f}",
            f"{1 - tail / base_tail:.0%}",
            f"{median(scheduler, 'summary', 'idle_share') or 0:.0%}",
            f"{median(scheduler, 'summary', 'preemptions') or 0:.0f}",
            f"{median(scheduler, 'summary', 'migrations') or 0:.0f}",
            f"{accepted:,.0f} of {drafted:,.0f}" if drafted else "-",
            f"{oracle / makespan:.0%}" if oracle is not None else "-",
            f"{error:+.0%}" if error is not None else "-",
            "identical" if not different else f"{different} differ",
        ]
        lines.append(f"| {' | '.join(cells)} |")
    return "\n".join(lines) + "\n"
