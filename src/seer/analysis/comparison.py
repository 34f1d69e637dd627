# SPDX-License-Identifier: Apache-2.0
"""Several schedulers on the same prompts, seeds and instances, so that nothing but the scheduler differs.

Fairness
  1. The same processes serve every run; before each one they load the weights again under a new weights version, so
     no KV and no draft of an earlier run can be reached.
  2. Runs are interleaved: each repetition goes through all schedulers, starting with another one each time,
     so that a machine that slows down or warms up affects all of them.
  3. A short run that is not counted comes first, so that no scheduler pays for what happens only once.
  4. Lengths are natural (on the local engine they are equal under all schedulers, because tokens are) or
     forced to a recorded run's. Differences between the schedulers' tokens are counted and shown.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from seer.analysis.explain import Explanation, explain
from seer.api import Rollout
from seer.errors import InputError, SeerError
from seer.metrics.events import Event, EventSink, both, discard
from seer.metrics.summary import Summary
from seer.runs.prompts import EncodedPrompt
from seer.runs.results import read_responses
from seer.runs.run import Lengths
from seer.types import GroupResult

WARM_UP_TOKENS = 8
"""Enough for prefill and a few decode steps; the run is not counted."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Measured:
    """One scheduler, one repetition."""

    scheduler: str
    repetition: int
    summary: Summary
    explanation: Explanation | None
    num_different: int
    """Responses whose tokens differ from the first run's."""


@dataclass(slots=True)
class Comparison:
    """All runs of a comparison."""

    schedulers: list[str]
    runs: list[Measured] = field(default_factory=list)

    def of(self, scheduler: str) -> list[Measured]:
        """The runs of one scheduler."""
        return [run for run in self.runs if run.scheduler == scheduler]

    def rows(self) -> list[dict[str, Any]]:
        """One row per scheduler: medians over the repetitions, with the spread of the throughput."""
        base = statistics.median(run.summary.throughput_tokens_s for run in self.of(self.schedulers[0]))
        return [self._row(scheduler, base) for scheduler in self.schedulers]

    def _row(self, scheduler: str, base_tokens_s: float) -> dict[str, Any]:
        runs = self.of(scheduler)
        rates = [run.summary.throughput_tokens_s for run in runs]
        oracles = [e.oracle_s for run in runs if (e := run.explanation) is not None and e.oracle_s is not None]
        makespan_s = statistics.median(run.summary.makespan_s for run in runs)
        oracle_s = statistics.median(oracles) if oracles else None
        return {
            "scheduler": scheduler,
            "throughput_tokens_s": statistics.median(rates),
            "throughput_min": min(rates),
            "throughput_max": max(rates),
            "speedup": statistics.median(rates) / base_tokens_s,
            "makespan_s": makespan_s,
            "tail_s": statistics.median(run.summary.tail_s for run in runs),
            "idle_share": statistics.median(run.summary.idle_share for run in runs),
            "preemptions": statistics.median(run.summary.preemptions for run in runs),
            "migrations": statistics.median(run.summary.migrations for run in runs),
            "drafted_tokens": statistics.median(_drafts(run)[0] for run in runs),
            "accepted_tokens": statistics.median(_drafts(run)[1] for run in runs),
            "oracle_s": oracle_s,
            "oracle_share": oracle_s / makespan_s if oracle_s is not None else None,
            "different_responses": max(run.num_different for run in runs),
            "num_requests": runs[0].summary.num_requests,
            "num_tokens": runs[0].summary.num_tokens,
            "repetitions": len(runs),
        }


def _drafts(run: Measured) -> tuple[int, int]:
    explanation = run.explanation
    return (0, 0) if explanation is None else (explanation.num_drafted, explanation.num_accepted)


def order_of_runs(schedulers: Sequence[str], repetitions: int) -> list[tuple[int, str]]:
    """Repetition and scheduler of each run; every repetition starts with another scheduler."""
    return [
        (repetition, schedulers[(start + repetition) % len(schedulers)])
        for repetition in range(repetitions)
        for start in range(len(schedulers))
    ]


async def compare(
    rollout: Rollout,
    prompts: Sequence[EncodedPrompt],
    schedulers: Sequence[str],
    *,
    repetitions: int = 1,
    seed: int = 0,
    lengths: Lengths | None = None,
    began: Callable[[int, str], EventSink] | None = None,
    ended: Callable[[Measured, list[GroupResult]], None] | None = None,
) -> Comparison:
    """Run every scheduler on a started rollout. `began` returns a sink for the events of the run that begins."""
    comparison = Comparison(list(schedulers))
    assert rollout.engine.model_dir is not None, "comparisons need an engine with weights"
    reference: dict[tuple[int, int], list[int]] | None = None
    await _warm_up(rollout, prompts)
    for repetition, scheduler in order_of_runs(schedulers, repetitions):
        await rollout.update_weights(rollout.engine.model_dir)
        events: list[Event] = []
        sink = both(events.append, discard if began is None else began(repetition, scheduler))
        groups = [
            group async for group in rollout.run(prompts, scheduler=scheduler, seed=seed, lengths=lengths, events=sink)
        ]
        tokens = {(r.group, r.index): r.token_ids for group in groups for r in group.responses}
        reference = tokens if reference is None else reference
        summary = rollout.summary
        if summary is None:
            errors = (r.error for group in groups for r in group.responses if r.error)
            raise SeerError(
                f"every response failed under {scheduler}: {next(errors, 'no reason was given')}",
                hint="there is nothing to compare",
            )
        measured = Measured(
            scheduler=scheduler,
            repetition=repetition,
            summary=summary,
            explanation=explain(events, max_num_seqs=[one.limits.max_num_seqs for one in rollout.fleet.instances]),
            num_different=sum(tokens[key] != ids for key, ids in reference.items()),
        )
        comparison.runs.append(measured)
        if ended is not None:
            ended(measured, groups)
    return comparison


async def _warm_up(rollout: Rollout, prompts: Sequence[EncodedPrompt]) -> None:
    few = [
        replace(prompt, sampling=replace(prompt.sampling, max_tokens=WARM_UP_TOKENS, min_tokens=0), n=2)
        for prompt in prompts[: 2 * len(rollout.fleet.instances)]
    ]
    async for _ in rollout.run(few, scheduler="verl"):
        pass


def recorded_lengths(results: Path, prompts: Sequence[EncodedPrompt]) -> list[list[int]]:
    """The lengths of these prompts' responses in a recorded run; refused if one is missing or did not end by itself."""
    by_response = {(r.prompt_id, r.index): r for r in read_responses(results)}
    lengths = []
    for prompt in prompts:
        row = []
        for index in range(prompt.n):
            response = by_response.get((prompt.prompt.id, index))
            if response is None or not response.is_complete:
                raise InputError(
                    f"{results} has no finished response {index} of prompt {prompt.prompt.id!r}",
                    hint="record a run with the same prompts and --n first",
                )
            row.append(min(response.num_tokens, prompt.sampling.max_tokens))
        lengths.append(row)
    return lengths
