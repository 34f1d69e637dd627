# SPDX-License-Identifier: Apache-2.0
"""Random workloads under every scheduler: the rules of the design hold at every event.

Checked by `roll_out` at each event: the buffer's and the fleet's own invariants, that time never runs
backwards, that no instance holds more KV than it has memory for and that no dividing scheduler promises more.
"""

from collections import Counter
from random import Random

from hypothesis import given, settings
from hypothesis import strategies as st

from builders import DIVIDING, WHOLE, Disturbance, Run, a_workload, roll_out
from seer.metrics.events import Ended, Preempted, Queued, Started, Stopped
from seer.rollout import RolloutLoop
from seer.sim.instance import SimulatedInstance
from seer.sim.workloads import BLOCK_SIZE, Workload
from seer.types import FinishReason

PROMPT = 10


@st.composite
def workloads(draw: st.DrawFn) -> Workload:
    """Groups of unequal sizes on a few instances, from roomy to just large enough for one request."""
    longest = draw(st.sampled_from([1, 63, 64, 65, 300, 600]))
    # Lengths come from a seed: hypothesis alone makes mostly tiny workloads, in which memory is never scarce.
    random = Random(draw(st.integers(0, 2**32)))
    num_groups, largest = draw(st.integers(1, 9)), draw(st.integers(1, 8))
    skew = draw(st.sampled_from([0.2, 1.0, 4.0]))
    lengths = [
        [1 + int((longest - 1) * random.random() ** skew) for _ in range(random.randint(1, largest))]
        for _ in range(num_groups)
    ]
    needed = -(-(PROMPT + longest) // BLOCK_SIZE) * BLOCK_SIZE
    return a_workload(
        lengths,
        instances=draw(st.integers(1, 5)),
        kv_tokens=needed * draw(st.sampled_from([1, 2, 5])) + draw(st.sampled_from([0, 64, 100])),
        max_tokens=longest,
        prompt=PROMPT,
        chunk_tokens=draw(st.sampled_from([1, 7, 64, 128, 300])) if longest <= 65 else draw(st.integers(40, 300)),
        max_num_seqs=draw(st.sampled_from([1, 3, 1000, 1000])),
    )


def assert_nothing_was_lost(run: Run) -> None:
    """Every request ended exactly once, with stop, and with exactly its true number of tokens."""
    wanted = {group: list(row) for group, row in enumerate(run.workload.lengths)}
    assert run.lengths() == wanted
    ended = Counter(event.request for event in run.events if isinstance(event, Ended))
    queued = Counter(event.request for event in run.events if isinstance(event, Queued))
    assert ended == queued
    assert set(ended.values()) == {1}
    started = Counter(event.request for event in run.events if isinstance(event, Started))
    stopped = Counter(event.request for event in run.events if isinstance(event, Stopped))
    assert started == stopped
    limit = run.workload.max_tokens
    for result in run.results:
        for response in result.responses:
            assert response.finish_reason in (FinishReason.STOP, FinishReason.LENGTH)
            assert (response.num_tokens < limit) <= (response.finish_reason is FinishReason.STOP)


def num_preemptions(run: Run) -> int:
    return sum(isinstance(event, Preempted) for event in run.events)


@settings(max_examples=60)
@given(workload=workloads(), scheduler=st.sampled_from(DIVIDING), drafts=st.booleans())
def test_dividing_schedulers_lose_nothing_and_never_preempt(workload: Workload, scheduler: str, drafts: bool) -> None:
    run = roll_out(workload, scheduler, drafts=drafts)
    assert_nothing_was_lost(run)
    assert num_preemptions(run) == 0


@settings(max_examples=40)
@given(workload=workloads(), scheduler=st.sampled_from([*WHOLE, "verl-sync+sd", "verl+sd"]))
def test_schedulers_that_leave_memory_to_the_engine_lose_nothing_either(workload: Workload, scheduler: str) -> None:
    assert_nothing_was_lost(roll_out(workload, scheduler))


@settings(max_examples=15)
@given(workload=workloads(), scheduler=st.sampled_from([*DIVIDING, *WHOLE]))
def test_equal_inputs_give_equal_plans(workload: Workload, scheduler: str) -> None:
    first = roll_out(workload, scheduler, checked=False)
    second = roll_out(workload, scheduler, checked=False)
    assert first.events == second.events


@settings(max_examples=30)
@given(
    workload=workloads(),
    scheduler=st.sampled_from([*DIVIDING, *WHOLE]),
    enough=st.integers(1, 8),
)
def test_stopping_early_ends_every_request_once_with_what_it_had(
    workload: Workload, scheduler: str, enough: int
) -> None:
    run = roll_out(workload, scheduler, enough_groups=enough)
    ended = Counter(event.request for event in run.events if isinstance(event, Ended))
    assert len(ended) == workload.num_requests
    assert set(ended.values()) == {1}
    whole = 0
    for result in run.results:
        row = workload.lengths[result.group]
        finished = [response.finish_reason is not FinishReason.CANCELLED for response in result.responses]
        whole += all(finished)
        for response, length, by_itself in zip(result.responses, row, finished, strict=True):
            assert response.num_tokens == length if by_itself else response.num_tokens <= length
    assert whole >= min(enough, len(workload.lengths))


@st.composite
def faults(draw: st.DrawFn) -> list[tuple[float, float, int]]:
    """When instances are lost, for how long, and which; always some time apart, never for good."""
    return draw(
        st.lists(st.tuples(st.floats(0.0, 8.0), st.floats(0.0, 3.0), st.integers(0, 4)), min_size=1, max_size=6)
    )


def disturbance(schedule: list[tuple[float, float, int]]) -> Disturbance:
    """Lose instances and bring fresh ones back in their place."""

    def disturb(loop: RolloutLoop, instances: list[SimulatedInstance], fresh: object) -> None:
        assert callable(fresh)
        clock = instances[0]._loop
        assert clock is not None

        def lose(instance: int, away_s: float) -> None:
            if not loop.fleet.alive(instance) or loop.buffer.drained:
                return
            loop.lose_instance(instance)
            clock.create_task(replace(instance, away_s))

        async def replace(instance: int, away_s: float) -> None:
            await instances[instance].close()  # outputs of the dead are superseded
            instances[instance] = fresh(instance)
            await instances[instance].start(loop.on_output)
            clock.call_later(away_s, loop.rejoin_instance, instance)

        for at_s, away_s, which in schedule:
            clock.call_at(at_s, lose, which % len(instances), away_s)

    return disturb


@settings(max_examples=60)
@given(workload=workloads(), scheduler=st.sampled_from([*DIVIDING, *WHOLE]), schedule=faults())
def test_losing_instances_loses_no_request_and_no_token(
    workload: Workload, scheduler: str, schedule: list[tuple[float, float, int]]
) -> None:
    run = roll_out(workload, scheduler, disturb=disturbance(schedule))
    assert_nothing_was_lost(run)
    if scheduler in DIVIDING:
        assert num_preemptions(run) == 0
