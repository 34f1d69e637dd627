"""What is made of vLLM's own numbers."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

pytest.importorskip("torch")

from seer.engine.drafter import StepReport
from vllm_engines import needs_vllm

pytestmark = needs_vllm


def a_state(num_running: int, **stats: float) -> Any:
    return SimpleNamespace(
        num_running_reqs=num_running, num_waiting_reqs=0, kv_cache_usage=0.5, kv_connector_stats=stats or None,
        spec_decoding_stats=None,
    )  # fmt: skip


def an_iteration(*, generated: int, preempted: int = 0, computed: int = 0, cached: int = 0) -> Any:
    return SimpleNamespace(
        num_generation_tokens=generated, num_preempted_reqs=preempted, num_prompt_tokens=computed + cached,
        prompt_token_stats=SimpleNamespace(computed=computed),
    )  # fmt: skip


def test_every_preemption_is_in_one_report_also_those_of_steps_that_gave_nothing() -> None:
    from seer.engine.vllm.telemetry import StepCounts

    reported: list[int] = []
    counts = StepCounts(on_step=lambda report: reported.append(report.num_preempted))
    counts.take(a_state(4), an_iteration(generated=0, preempted=0, computed=9))  # nothing ran before it
    counts.take(a_state(3), an_iteration(generated=4, preempted=1))
    counts.take(a_state(1), an_iteration(generated=0, preempted=2))  # no output, no report
    counts.take(a_state(1), an_iteration(generated=1, preempted=0))
    counts.take(a_state(1), an_iteration(generated=1, preempted=0))
    assert reported == [1, 2, 0]
    assert counts.num_preemptions == 3


def test_cached_tokens_of_a_context_are_no_work() -> None:
    from seer.engine.vllm.telemetry import StepCounts

    reports: list[StepReport] = []
    counts = StepCounts(on_step=reports.append)
    counts.take(a_state(1), an_iteration(generated=1))
    counts.take(a_state(2), an_iteration(generated=2, computed=5, cached=1000))
    assert [(report.num_rows, report.num_prefill_rows) for report in reports] == [(7, 5)]


def test_what_the_connector_counted_goes_before_what_vllm_says() -> None:
    from seer.engine.vllm.telemetry import StepCounts

    reports: list[StepReport] = []
    counts = StepCounts(on_step=reports.append)
    counts.take(a_state(1, seer_loaded_bytes=64, seer_load_aside_s=0.5), an_iteration(generated=1))
    counts.take(a_state(1, seer_rows=40, seer_prefill_rows=40), an_iteration(generated=0))  # part of a context
    counts.take(a_state(2, seer_rows=9, seer_prefill_rows=7), an_iteration(generated=2, computed=47))
    assert [(r.num_rows, r.num_prefill_rows, r.num_emitted) for r in reports] == [(40, 40, 0), (9, 7, 2)]
    assert [(r.loaded_bytes, r.load_aside_s, r.load_s) for r in reports] == [(64, 0.5, 0.0), (0, 0.0, 0.0)]
