# SPDX-License-Identifier: Apache-2.0
"""Leases in vLLM's scheduler: where a request ends is written to its record, before and while it runs."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import msgspec
import pytest

pytest.importorskip("torch")

from chunk_facts_cases import BAD, GOOD, NUM_TOKENS
from seer.engine.vllm.chunk_facts import EXTRA
from vllm_engines import needs_vllm

pytestmark = needs_vllm
NUM_PROMPT_TOKENS = 5
RUN = "run"


def a_request(number: int = 0, *, lease: int, max_left: int = 100, num_output: int = 0, run: str = RUN) -> Any:
    facts = GOOD | {"run": run, "request": number, "attempt": 1, "lease": lease, "num_prompt_tokens": NUM_PROMPT_TOKENS}
    return SimpleNamespace(
        sampling_params=SimpleNamespace(extra_args={EXTRA: facts}),
        request_id=f"{number}.1",
        max_tokens=max_left,
        num_output_tokens=num_output,
        num_tokens=NUM_PROMPT_TOKENS + num_output,
        is_finished=lambda: False,
    )


@pytest.fixture
def scheduler(monkeypatch: pytest.MonkeyPatch) -> Any:
    from vllm.v1.core.sched.scheduler import Scheduler

    from seer.engine.vllm.leased_scheduler import LeasedScheduler

    monkeypatch.setattr(Scheduler, "__init__", lambda self: self.__dict__.update(requests={}, block_size=8))
    monkeypatch.setattr(Scheduler, "add_request", lambda self, request: None)
    return LeasedScheduler()


def test_a_request_ends_at_its_lease_and_an_extension_moves_the_end(scheduler: Any) -> None:
    request = a_request(lease=64)
    scheduler.add_request(request)
    assert request.max_tokens == 64
    scheduler.renew_leases(RUN, [[0, 1, 96], [0, 1, 70], [0, 2, 99]], [])
    assert request.max_tokens == 96


@pytest.mark.parametrize(
    ("num_output", "lease", "end"),
    [
        (10, 64, 12),  # the KV of 5 + 12 tokens but the last fills two blocks
        (11, 64, 12),  # ends with the next token, which is computed already
        (12, 64, 20),
        (12, 17, 17),  # the lease ends before the block
    ],
)
def test_a_parked_request_ends_with_its_block(scheduler: Any, num_output: int, lease: int, end: int) -> None:
    request = a_request(lease=lease, num_output=num_output)
    scheduler.add_request(request)
    scheduler.renew_leases(RUN, [], [[0, 1], [7, 1]])
    assert request.max_tokens == end


def test_what_comes_before_its_request_is_kept_for_it(scheduler: Any) -> None:
    scheduler.renew_leases(RUN, [[0, 1, 96]], [[1, 1]])
    extended, parked = a_request(0, lease=64), a_request(1, lease=64)
    for request in (extended, parked):
        scheduler.add_request(request)
    assert (extended.max_tokens, parked.max_tokens) == (96, 1)


def test_what_came_after_its_request_had_ended_is_not_for_a_later_run(scheduler: Any) -> None:
    scheduler.renew_leases(RUN, [[0, 1, 96]], [[1, 1]])  # neither is there any more
    later = [a_request(number, lease=64, run="later") for number in (0, 1)]
    for request in later:
        scheduler.add_request(request)
    assert [request.max_tokens for request in later] == [64, 64]


def test_the_engine_finds_the_call_and_this_vllm_has_the_names(scheduler: Any) -> None:
    from vllm.v1.engine.core import EngineCore, EngineCoreProc

    from seer.engine.vllm.guards import COUNTING, missing_name
    from seer.engine.vllm.leased_scheduler import RENEW

    request = a_request(lease=8)
    scheduler.add_request(request)
    renew = getattr(EngineCore, RENEW).__get__(SimpleNamespace(scheduler=scheduler))
    renew(*EngineCoreProc._convert_msgspec_args(renew, (RUN, [[0, 1, 20]], [])))  # as vLLM calls it
    assert request.max_tokens == 20
    assert missing_name(COUNTING) is None


@pytest.mark.parametrize(("name", "value"), BAD)
def test_a_request_with_bad_facts_runs_without_a_lease(scheduler: Any, name: str, value: Any) -> None:
    request = a_request(lease=8)
    request.num_tokens = NUM_TOKENS
    request.sampling_params.extra_args[EXTRA][name] = value
    scheduler.add_request(request)
    assert request.max_tokens == 100
    assert not scheduler._leased


@pytest.mark.parametrize(
    ("leases", "parked"),
    [
        ([[0, 1]], []),
        ([[0, 1, 0]], []),
        ([[0, 1, 1 << 40]], []),
        ([[0, True, 20]], []),
        ([["0", 1, 20]], []),
        (5, []),
        ([], [[0]]),
        ([], [[-1, 1]]),
    ],
)
def test_a_renewal_of_another_form_fails_and_changes_nothing(scheduler: Any, leases: Any, parked: Any) -> None:
    from vllm.v1.engine.core import EngineCore

    from seer.engine.vllm.leased_scheduler import RENEW

    request = a_request(lease=8)
    scheduler.add_request(request)
    with pytest.raises(msgspec.ValidationError):
        getattr(EngineCore, RENEW)(SimpleNamespace(scheduler=scheduler), RUN, leases, parked)
    assert request.max_tokens == 8
    assert not scheduler._early
