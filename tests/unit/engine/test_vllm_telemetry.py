"""What is made of vLLM's own numbers."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

pytest.importorskip("torch")

from vllm_engines import needs_vllm

pytestmark = needs_vllm


def a_state(num_running: int) -> Any:
    return SimpleNamespace(
        num_running_reqs=num_running, num_waiting_reqs=0, kv_cache_usage=0.5, kv_connector_stats=None,
        spec_decoding_stats=None,
    )  # fmt: skip


def an_iteration(*, generated: int, preempted: int, prompt: int = 0) -> Any:
    return SimpleNamespace(
        num_generation_tokens=generated, num_preempted_reqs=preempted, num_prompt_tokens=prompt
    )  # fmt: skip


def test_every_preemption_is_in_one_report_also_those_of_steps_that_gave_nothing() -> None:
    from seer.engine.vllm.telemetry import StepCounts

    reported: list[int] = []
    counts = StepCounts(on_step=lambda report: reported.append(report.num_preempted))
    counts.take(a_state(4), an_iteration(generated=0, preempted=0, prompt=9))  # nothing ran before it
    counts.take(a_state(3), an_iteration(generated=4, preempted=1))
    counts.take(a_state(1), an_iteration(generated=0, preempted=2))  # no output, no report
    counts.take(a_state(1), an_iteration(generated=1, preempted=0))
    counts.take(a_state(1), an_iteration(generated=1, preempted=0))
    assert reported == [1, 2, 0]
    assert counts.num_preemptions == 3
