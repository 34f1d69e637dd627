# SPDX-License-Identifier: Apache-2.0
import pytest

from seer.analysis.explain import StepFit, explain, fit_steps, oracle_makespan_s
from seer.metrics.events import Answered, Asked, Ended, Event, InstanceState, Queued, Stepped


def a_state(t_s: float, instance: int, running: int) -> InstanceState:
    return InstanceState(t_s, instance, running, 0, 0)


def some_steps(t_s: float, instance: int, steps: int, rows: int, *, prefill: int = 0, drafted: int = 0) -> Stepped:
    seconds = 0.1 * steps + 0.01 * rows
    return Stepped(t_s, instance, steps, seconds, rows, prefill, rows - prefill - drafted, drafted, 0)


def test_every_second_is_put_under_one_heading() -> None:
    events: list[Event] = [Queued(0.0, r, r, 0, 10) for r in range(10)]
    events += [a_state(0.0, 0, 4), a_state(1.0, 1, 4)]  # instance 1 starts late: imbalance
    events += [some_steps(5.0, 0, 10, 100, prefill=40), some_steps(5.0, 1, 10, 200, prefill=160, drafted=20)]
    events += [Ended(5.0, r, 10, "stop") for r in range(9)]
    events += [a_state(6.0, 1, 0), Ended(8.0, 9, 10, "stop"), a_state(8.0, 0, 0)]
    found = explain(events, max_num_seqs=[4, 4])
    assert found is not None
    assert found.makespan_s == 8.0
    assert sum(found.seconds.values()) == pytest.approx(8.0)
    assert found.seconds["imbalance"] == pytest.approx(0.5)
    assert found.seconds["tail"] == pytest.approx(1.0)
    assert found.seconds["recompute"] > 0
    assert found.seconds["speculation"] > 0
    assert found.busy_share == [pytest.approx(1.0), pytest.approx(5 / 8)]


def test_time_spent_on_loading_kv_is_migration_and_not_overhead() -> None:
    steps = Stepped(4.0, 0, 10, 3.0, 30, 0, 30, 0, 0, load_s=1.0, loaded_bytes=1 << 20)
    events: list[Event] = [Queued(0.0, 0, 0, 0, 3), a_state(0.0, 0, 1), steps, Ended(5.0, 0, 30, "stop")]
    found = explain(events, max_num_seqs=[4])
    assert found is not None
    kinds = ("decode", "migration", "overhead")
    assert [found.seconds[kind] for kind in kinds] == pytest.approx([3.0, 1.0, 1.0])


def test_without_step_reports_running_is_decoding_and_there_is_no_bound() -> None:
    events: list[Event] = [Queued(0.0, 0, 0, 0, 3), a_state(0.0, 0, 1), Ended(2.0, 0, 5, "stop")]
    found = explain(events, max_num_seqs=[4])
    assert found is not None
    assert found.seconds["decode"] == pytest.approx(2.0)
    assert found.oracle_s is None


def test_the_ideal_schedule_of_a_resumed_run_is_that_of_what_was_left() -> None:
    def oracle_s(queued: Queued) -> float | None:
        steps = [some_steps(float(i), 0, 5 + i, 10 * i + 5) for i in range(1, 9)]
        found = explain([queued, a_state(0.0, 0, 1), *steps, Ended(9.0, 0, 100, "stop")], max_num_seqs=[4])
        assert found is not None
        return found.oracle_s

    assert oracle_s(Queued(0.0, 0, 0, 0, 3)) == pytest.approx(100 * (0.1 + 0.01))
    assert oracle_s(Queued(0.0, 0, 0, 0, 3, num_generated=60)) == pytest.approx(40 * (0.1 + 0.01))


def test_nothing_ended_nothing_explained() -> None:
    assert explain([Queued(0.0, 0, 0, 0, 3)], max_num_seqs=[4]) is None


def test_the_step_cost_is_recovered_from_reports() -> None:
    fit = fit_steps([some_steps(float(i), 0, 5 + i, 10 * i + 5) for i in range(1, 9)])
    assert fit is not None
    assert fit.base_s == pytest.approx(0.1)
    assert fit.slope_s == pytest.approx(0.01)
    assert fit_steps([some_steps(0.0, 0, 1, 1, prefill=1)]) is None
    assert fit_steps([some_steps(0.0, 0, 2, 8)]) == StepFit(0.0, 0.28 / 8)


def test_rows_of_prompts_have_a_price_of_their_own() -> None:
    plain = [some_steps(float(i), 0, 5 + i, 10 * i + 5) for i in range(1, 9)]
    beside = Stepped(9.0, 0, 2, 0.1 * 2 + 0.01 * 6 + 0.002 * 100, 106, 100, 6, 0, 0)
    fit = fit_steps([*plain, beside])
    assert fit is not None
    assert fit.prefill_token_s == pytest.approx(0.002)
    assert fit.step_s(3, 50) == pytest.approx(0.1 + 0.03 + 0.1)
    unseen = fit_steps(plain)
    assert unseen is not None
    assert unseen.prefill_token_s == pytest.approx(unseen.slope_s)


def test_a_fit_takes_as_long_as_the_run_did_even_where_no_line_fits() -> None:
    # A step that grows with the square of its rows; the small ones are seen often.
    curved = [
        Stepped(0.0, 0, n, n * (0.002 + 1e-6 * b * b), n * b, 0, n * b, 0, 0) for b, n in ((1, 90), (64, 40), (256, 9))
    ]
    fit = fit_steps(curved)
    assert fit is not None
    fitted_s = sum(s.num_steps * fit.base_s + s.num_batched_tokens * fit.slope_s for s in curved)
    assert fitted_s == pytest.approx(sum(s.duration_s for s in curved))


def test_a_fit_never_claims_that_work_takes_less_than_nothing() -> None:
    noisy = [Stepped(0.0, 0, 10, 1.0, 100, 0, 100, 0, 0), Stepped(0.0, 0, 10, 2.0, 50, 0, 50, 0, 0)] * 3
    fit = fit_steps(noisy)
    assert fit is not None
    assert fit.base_s >= 0
    assert fit.slope_s >= 0


@pytest.mark.parametrize(
    ("lengths", "instances", "running", "steps_s"),
    [
        ([100], 1, 1, 100.0),
        ([50, 50], 1, 1, 100.0),
        ([50, 50], 2, 1, 50.0),
        ([100, 10, 10, 10], 2, 1, 100.0),
        ([30, 30, 30], 2, 1, 45.0),  # longest remaining first, moving for free
        ([10] * 8, 2, 4, 10.0),
    ],
)
def test_the_oracle_estimate_of_schedules_one_can_do_in_the_head(
    lengths: list[int], instances: int, running: int, steps_s: float
) -> None:
    assert oracle_makespan_s(lengths, [running] * instances, StepFit(1.0, 0.0)) == pytest.approx(steps_s, abs=1.01)


def test_idle_instances_that_wait_for_tools_alone_are_counted_as_such_and_given_tokens_are_no_recomputation() -> None:
    events: list[Event] = [Queued(0.0, r, r, 0, 10) for r in range(10)]
    events += [a_state(0.0, 0, 10), some_steps(2.0, 0, 10, 200, prefill=100), a_state(2.0, 0, 0)]
    events += [Asked(2.0, 0, 1), Asked(2.5, 1, 1), Answered(3.0, 0, 40, 1), Answered(4.0, 1, 60, 1)]
    events += [a_state(5.0, 0, 10), some_steps(6.0, 0, 10, 100, prefill=100), a_state(6.0, 0, 0)]
    events += [Ended(6.0, r, 10, "stop") for r in range(10)]
    found = explain(events, max_num_seqs=[10])
    assert found is not None
    assert found.seconds["tools"] == pytest.approx(2.0)  # from 2 to 4
    assert found.seconds["queueing"] == pytest.approx(1.0)  # answered at 4, started at 5
    assert found.seconds["recompute"] == 0
    assert sum(found.seconds.values()) == pytest.approx(6.0)
