# SPDX-License-Identifier: Apache-2.0
"""Step reports from vLLM's statistics."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

pytest.importorskip("torch")

from seer.speculation.step_report import StepReport
from vllm_engines import needs_vllm

pytestmark = needs_vllm


def a_state(
    num_running: int, *, rows: int = 1, prefill: int = 0, emitted: int = 0, done_s: float | None = 1.0, **stats: float
) -> Any:
    if done_s is not None:
        stats |= {
            "seer_batched_tokens": rows,
            "seer_prefill_tokens": prefill,
            "seer_emitted": emitted,
            "seer_done_s": done_s,
        }
    return SimpleNamespace(
        num_running_reqs=num_running, num_waiting_reqs=0, kv_cache_usage=0.5, kv_connector_stats=stats or None,
        spec_decoding_stats=None,
    )  # fmt: skip


def an_iteration(preempted: int = 0) -> Any:
    return SimpleNamespace(num_preempted_reqs=preempted)


def test_every_preemption_is_in_one_report_also_those_of_steps_that_computed_nothing() -> None:
    from seer.engine.vllm.telemetry import StepCounts

    reported: list[int] = []
    counts = StepCounts(on_step=lambda report: reported.append(report.num_preempted))
    counts.take(a_state(4), an_iteration())  # nothing ran before it
    counts.take(a_state(3), an_iteration(1))
    counts.take(a_state(1, done_s=None), an_iteration(2))  # no rows, no report
    counts.take(a_state(1), an_iteration())
    counts.take(a_state(1), an_iteration())
    assert reported == [1, 2, 0]
    assert counts.num_preemptions == 3


def test_a_step_lasts_from_the_end_of_the_step_before_to_its_own() -> None:
    from seer.engine.vllm.telemetry import StepCounts

    reports: list[StepReport] = []
    counts = StepCounts(on_step=reports.append)
    counts.take(a_state(1, done_s=5.0), an_iteration())
    counts.take(a_state(1, done_s=None, seer_loaded_bytes=64, seer_overlapped_load_s=0.5), None)
    counts.take(a_state(1, done_s=6.5, rows=41, prefill=40, seer_load_s=0.5), None)  # part of a context: no output
    counts.take(a_state(2, done_s=6.75, rows=9, prefill=7, emitted=2), an_iteration())
    assert [(r.duration_s, r.num_batched_tokens, r.num_prefill_tokens, r.num_emitted) for r in reports] == [
        (1.0, 41, 40, 0),
        (0.25, 9, 7, 2),
    ]
    assert [(r.loaded_bytes, r.overlapped_load_s, r.load_s) for r in reports] == [(64, 0.5, 0.5), (0, 0.0, 0.0)]


def test_prefill_tokens_are_those_that_neither_sample_nor_draft() -> None:
    from seer.engine.vllm.step_counting import BATCHED_TOKENS, PREFILL_TOKENS, count_batched_tokens

    step: Any = SimpleNamespace(
        total_num_scheduled_tokens=105,
        num_scheduled_tokens={"computes its context": 100, "samples": 1, "drafts": 4},
        scheduled_spec_decode_tokens={"drafts": [7, 8, 9]},
    )
    assert count_batched_tokens(step) == {BATCHED_TOKENS: 105, PREFILL_TOKENS: 99}
