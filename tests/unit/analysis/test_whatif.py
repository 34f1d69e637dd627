# SPDX-License-Identifier: Apache-2.0
"""A recorded run, replayed: its own cost, its own drafts."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from builders import a_workload
from seer.analysis.explain import StepFit
from seer.analysis.tool_waits import recorded_turns
from seer.analysis.whatif import (
    NO_DRAFTS,
    DraftGain,
    RecordedCost,
    draft_gains,
    read_recorded,
    recorded_run,
    replay_under,
)
from seer.cli.main import main
from seer.errors import InputError
from seer.integrations.verl.step_record import StepRecord
from seer.metrics.events import Answered, Asked, Ended, Event, InstanceState, Prefilling, Queued, Stepped
from seer.metrics.jsonl import EventLog
from seer.runs.manifest import recorded_limits
from seer.runs.run_folder import RunFolder
from seer.sim.cluster import simulate
from seer.sim.costs import H200, MODELS
from seer.sim.turns import LogNormal, TurnModel, plan_turns
from seer.types import InstanceLimits

LIMITS = InstanceLimits(kv_blocks=1000, block_size=16, max_num_seqs=4, max_model_len=4096)
SMALL = replace(LIMITS, max_num_seqs=1)
BASE_S, SLOPE_S = 0.02, 0.005
SLOW = 3.0
"""Times as long as on other instances: a step of a small one."""


def some_steps(t_s: float, batch: int, steps: int, *, drafted: int = 0, accepted: int = 0) -> Stepped:
    rows = steps * batch * (1 + drafted)
    seconds = steps * BASE_S + SLOPE_S * rows
    emitted = steps * batch * (1 + accepted)
    return Stepped(t_s, 0, steps, seconds, rows, 0, emitted, steps * batch * drafted, steps * batch * accepted)


def a_run(lengths: list[int], *, drafted: int = 0, accepted: int = 0) -> list[Event]:
    """All requests together on one instance until each ends."""
    events: list[Event] = [Queued(0.0, r, r, 0, 1) for r in range(len(lengths))]
    events.append(InstanceState(0.0, 0, len(lengths), 0, 0))
    at_s, made = 0.0, 0
    for length in sorted(set(lengths)):
        batch = sum(one >= length for one in lengths)
        steps = some_steps(0.0, batch, (length - made) // (1 + accepted), drafted=drafted, accepted=accepted)
        at_s, made = at_s + steps.duration_s, length
        events.append(some_steps(at_s, batch, steps.num_steps, drafted=drafted, accepted=accepted))
        events += [Ended(at_s, r, length, "stop") for r, one in enumerate(lengths) if one == length]
    return events


def an_unlike_run(length: int) -> list[Event]:
    """Three requests together on one instance, and two in turn on a smaller one whose steps take longer."""
    events: list[Event] = [Queued(0.0, r, r, 0, 1) for r in range(5)]
    events += [InstanceState(0.0, 0, 3, 0, 0), InstanceState(0.0, 1, 1, 1, 0)]
    for batch in (1, 2, 3):  # reports of several sizes, for a cost per token
        events.append(some_steps(0.1 * batch, batch, length // 3))
    slow = SLOW * (BASE_S + SLOPE_S)
    for number in (1, 2):
        at_s = number * length * slow
        events.append(Stepped(at_s, 1, length, length * slow, length, 0, length, 0, 0))
    return events + [Ended(2 * length * slow, r, length, "stop") for r in range(5)]


def test_unlike_instances_are_replayed_with_their_own_slots_and_step_costs() -> None:
    limits = [LIMITS, SMALL]
    recorded = recorded_run(an_unlike_run(90), scheduler="verl", limits=limits, max_tokens=90, chunk_tokens=None)
    assert recorded.fit_of(LIMITS).step_s(2) == pytest.approx(BASE_S + 2 * SLOPE_S)
    assert recorded.fit_of(SMALL).step_s(1) == pytest.approx(SLOW * (BASE_S + SLOPE_S))
    in_turn_s = 2 * 90 * SLOW * (BASE_S + SLOPE_S)
    assert replay_under(recorded, "verl").makespan_s == pytest.approx(in_turn_s, rel=0.05)


def test_a_step_of_verl_is_replayed_on_its_unlike_servers() -> None:
    record = StepRecord("000001", began_s=0.0, weights_version=1, num_servers=2, folder=None, manifest={})
    for event in an_unlike_run(90):
        record(event)
    stock_s = [record.replay([LIMITS, second], None)["stock_rollout_s"] for second in (LIMITS, SMALL)]
    assert stock_s[1] == pytest.approx(2 * 90 * SLOW * (BASE_S + SLOPE_S), rel=0.05)
    assert stock_s[1] > 1.5 * stock_s[0]


def test_a_recorded_run_of_unlike_instances_is_read_and_replayed(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = RunFolder(tmp_path / "run")
    folder.create()
    options = {"scheduler": "verl", "instances": 2, "max_tokens": 90}
    folder.write_manifest({"command": "rollout", "options": options, **recorded_limits([LIMITS, SMALL])})
    with EventLog(folder.events, {}) as log:
        for event in an_unlike_run(90):
            log(event)
    assert read_recorded(folder).limits == (LIMITS, SMALL)
    assert main(["replay", str(folder.path), "--scheduler", "verl"]) == 0
    printed = capsys.readouterr().out
    assert "20.0 + 5.00 B ms on 1 of 2 instances (4 requests, 16,000 tokens of KV)" in printed
    assert "0.0 + 75.00 B ms on 1 of 2 instances (1 requests, 16,000 tokens of KV)" in printed


@pytest.mark.parametrize(("drafted", "accepted"), [(0, 0), (3, 1)])
def test_under_its_own_scheduler_a_run_is_predicted_as_it_was(drafted: int, accepted: int) -> None:
    events = a_run([100, 200, 300, 600], drafted=drafted, accepted=accepted)
    recorded = recorded_run(events, scheduler="seer", limits=[LIMITS], max_tokens=600, chunk_tokens=None)
    assert recorded.fit.base_s == pytest.approx(BASE_S)
    assert replay_under(recorded, "seer").makespan_s == pytest.approx(recorded.makespan_s, rel=0.05)


def test_a_resumed_run_is_refused_because_its_events_are_those_of_its_last_part() -> None:
    events = a_run([100, 200])
    events[0] = Queued(0.0, 0, 0, 0, 1, num_generated=30)
    with pytest.raises(InputError, match="resumed"):
        recorded_run(events, scheduler="seer", limits=[LIMITS], max_tokens=200, chunk_tokens=None)


def test_a_scheduler_without_drafts_gets_none() -> None:
    events = a_run([200, 400], drafted=3, accepted=3)
    recorded = recorded_run(events, scheduler="seer", limits=[LIMITS], max_tokens=400, chunk_tokens=None)
    drafting, plain = (replay_under(recorded, scheduler).makespan_s for scheduler in ("seer", "divided"))
    assert plain > 1.5 * drafting


def test_gains_are_looked_up_by_the_nearest_batch_size() -> None:
    gains = draft_gains([some_steps(0.0, 1, 10, drafted=4, accepted=2), some_steps(0.0, 16, 10)])
    assert gains == {1: DraftGain(5.0, 3.0), 16: DraftGain(1.0, 1.0)}
    cost = RecordedCost(model=MODELS["llama-8b"], gpu=H200, fit=StepFit(BASE_S, SLOPE_S), gains=gains)
    assert cost.step(2).base_s == pytest.approx((BASE_S + SLOPE_S * 2 * 5) / 3)
    assert cost.step(20).base_s == pytest.approx(BASE_S + SLOPE_S * 20)
    assert draft_gains([some_steps(0.0, 4, 3)]) == {}
    assert RecordedCost(model=MODELS["llama-8b"], gpu=H200, fit=StepFit(1.0, 0.0))._gain(3) == NO_DRAFTS


def test_kv_moves_as_fast_as_it_did() -> None:
    events = a_run([200, 400])
    few: dict[str, Any] = {
        "scheduler": "seer",
        "limits": [LIMITS],
        "max_tokens": 400,
        "chunk_tokens": None,
    }
    assert recorded_run(events, **few).load_token_s == 0.0
    loaded = [Prefilling(0.1, 0, 0, 1, 0, 300), Prefilling(0.2, 1, 0, 1, 0, 100)]
    reported = [Stepped(0.3, 0, 1, 0.025, 1, 0, 1, 0, 0, load_s=0.3, overlapped_load_s=0.1, loaded_bytes=1)]
    recorded = recorded_run([*events, *loaded, *reported], **few)
    assert recorded.load_token_s == pytest.approx(1e-3)
    cost = RecordedCost(model=MODELS["llama-8b"], gpu=H200, fit=StepFit(1.0, 0.0), load_token_s=1e-3)
    costs = cost.transfer_costs()
    assert cost.transfer_s(50) == costs.move.seconds(50 * costs.bytes_per_token) == pytest.approx(0.05)


def test_a_run_that_was_cut_cannot_be_replayed() -> None:
    events = [*a_run([100, 200])[:-1], Ended(9.0, 1, 50, "cancelled")]
    with pytest.raises(InputError, match="1 of 2 responses did not end"):
        recorded_run(events, scheduler="seer", limits=[LIMITS], max_tokens=200, chunk_tokens=None)


def test_turns_are_replayed_with_the_tools_of_the_recorded_run() -> None:
    lengths = [[30, 50], [40, 90]]
    model = TurnModel(
        tool_s=LogNormal(median=2.0, sigma=1.0, least=0.5, most=9.0),
        given_tokens=LogNormal(median=20, sigma=0.5, least=5, most=60),
        most_turns=4,
    )
    workload = replace(
        a_workload(lengths, instances=1, kv_tokens=2_000, prompt=30), turns=plan_turns(lengths, model, seed=1)
    )
    events: list[Event] = []
    simulate(workload, "seer", events=events.append)
    found = recorded_turns(events)
    assert [(found[i].ends, found[i].given) for i in range(4)] == [(one.ends, one.given) for one in workload.turns]
    for i, one in enumerate(workload.turns):
        assert found[i].tool_s == pytest.approx(one.tool_s)
    events.append(some_steps(1.0, 1, 10))
    events.append(some_steps(1.0, 4, 10))
    recorded = recorded_run(events, scheduler="seer", limits=[LIMITS], max_tokens=90, chunk_tokens=None)
    longest_s = max(sum(one.tool_s) for one in workload.turns)
    for scheduler in ("seer", "verl"):
        summary = replay_under(recorded, scheduler)
        assert summary.num_turns == sum(len(one.ends) for one in workload.turns)
        assert summary.makespan_s > longest_s
        assert summary.num_tokens == workload.num_tokens


def test_turns_that_are_not_whole_in_the_events_are_refused() -> None:
    events = a_run([100, 200])
    events[3:3] = [Asked(0.1, 0, 1), Answered(0.2, 0, 5, 1)]
    with pytest.raises(InputError, match="the turns of 2 responses"):
        recorded_run(events, scheduler="seer", limits=[LIMITS], max_tokens=200, chunk_tokens=None)
