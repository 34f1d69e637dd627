# SPDX-License-Identifier: Apache-2.0
"""Drafts of a step, without vLLM: what is indexed, how long drafts are, how they are padded."""

from __future__ import annotations

from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

import msgspec
import pytest

pytest.importorskip("seer.drafting._index", reason="needs the native draft index")

from chunk_facts_cases import GOOD
from seer.config.engines import Padding
from seer.drafting.client import DraftClient
from seer.engine.vllm import step_drafting
from seer.engine.vllm.chunk_facts import ChunkFacts
from seer.engine.vllm.step_drafting import FILLER_TOKEN, StepDrafting

SIBLING = [11, 12, 13, 14, 15, 16, 17, 18]


@dataclass
class ARequest:
    """The attributes of vLLM's request that drafting reads."""

    request_id: str
    all_token_ids: list[int]
    num_prompt: int
    max_tokens: int = 100
    min_tokens: int = 0
    is_over: bool = False

    @property
    def sampling_params(self) -> Any:
        return SimpleNamespace(min_tokens=self.min_tokens)

    @property
    def num_tokens(self) -> int:
        return len(self.all_token_ids)

    @property
    def num_computed_tokens(self) -> int:
        return len(self.all_token_ids) - 1

    @property
    def num_output_tokens(self) -> int:
        return len(self.all_token_ids) - self.num_prompt

    def is_finished(self) -> bool:
        return self.is_over


class Steps:
    """Drives `StepDrafting` as the scheduler does."""

    def __init__(self, *, padding: Padding = "none", fixed_tokens: int | None = 4, max_model_len: int = 1000) -> None:
        self.drafting = StepDrafting(
            max_tokens=4, max_model_len=max_model_len, padding=padding, servers=(), fixed_tokens=fixed_tokens
        )
        self.requests: dict[str, ARequest] = {}
        self._drafts: dict[str, list[int]] = {}

    def add(
        self,
        number: int,
        generated: list[int],
        *,
        drafts: str = "grouped",
        group: int = 0,
        ended_groups: tuple[int, ...] = (),
        **changes: Any,
    ) -> ARequest:
        request = ARequest(str(number), [1, 2, 3, *generated], 3 + len(generated), **changes)
        given = {"drafts": drafts, "group": group, "ended_groups": ended_groups, "request": number}
        self.drafting.track(request, msgspec.convert(GOOD | given, ChunkFacts))  # type: ignore[arg-type]
        self.requests[request.request_id] = request
        return request

    def step(self, generated: dict[int, list[int]], *, took_s: float = 0.0) -> list[list[int]]:
        """Every request gets these tokens; returns the drafts that follow, in the order of the requests."""
        self.drafting.begin_step()
        self.drafting._began_s -= took_s
        for number, tokens in generated.items():
            self.requests[str(number)].all_token_ids.extend(tokens)
        keys = [str(number) for number in generated]
        before = {key: self._drafts.get(key, []) for key in keys}
        self.drafting.end_step({key: 1 + len(before[key]) for key in keys}, before)
        drafts = self.drafting.draft(keys)
        self._drafts = dict(zip(keys, drafts, strict=True))
        return drafts


def test_a_request_drafts_the_tokens_of_its_sibling() -> None:
    steps = Steps()
    steps.add(1, [])
    steps.add(2, [])
    steps.step({1: SIBLING, 2: [99]})
    (_, draft) = steps.step({1: [50], 2: [12]})
    assert draft == [13, 14, 15, 16]


def test_an_aborted_request_is_forgotten_with_the_next_one() -> None:
    steps = Steps()
    steps.add(1, SIBLING)
    steps.step({1: [11, 12]})
    assert steps.drafting._drafter._newest.keys() == {1}
    steps.requests["1"].is_over = True
    steps.add(2, [])
    assert steps.drafting._drafter._newest == {}


def test_a_group_that_has_ended_is_forgotten_with_the_next_request() -> None:
    steps = Steps()
    steps.add(1, SIBLING, group=7)
    steps.step({1: [50]})
    held = steps.drafting._drafter._client.index.stats
    assert held().groups == 1
    steps.requests["1"].is_over = True
    steps.add(2, [], group=8, ended_groups=(7,))
    assert held().groups == 1, "the new group alone"
    steps.drafting._drafter.drop(8)
    assert held().groups == 0


def test_tokens_of_another_instance_are_indexed_on_arrival() -> None:
    steps = Steps()
    steps.add(1, SIBLING)
    steps.add(2, [])
    assert steps.step({2: [12]}) == [[13, 14, 15, 16]]


def test_the_last_tokens_of_a_response_are_indexed_with_its_end(monkeypatch: pytest.MonkeyPatch) -> None:
    learned: list[int] = []
    learn = DraftClient.observe_batch

    def noted(client: DraftClient, requests: Any, tokens: Any, *rest: Any, **more: Any) -> None:
        learned.extend(tokens.tolist())
        learn(client, requests, tokens, *rest, **more)

    monkeypatch.setattr(DraftClient, "observe_batch", noted)
    monkeypatch.setattr("seer.drafting.grouped_drafter.HOLD_S", 1e9)  # no draft and no step follows
    steps = Steps(fixed_tokens=0)
    steps.add(1, []).is_over = True
    steps.step({1: SIBLING})
    assert learned == SIBLING


def test_a_draft_ends_with_its_chunk_and_with_the_context() -> None:
    steps = Steps()
    steps.add(1, SIBLING)
    steps.add(2, [], max_tokens=4)
    assert steps.step({2: [12]}) == [[13, 14]], "4 tokens: 1 generated, 1 sampled by the step itself"
    short = Steps(max_model_len=7)
    short.add(1, SIBLING)
    short.add(2, [])
    assert short.step({2: [12]}) == [[13, 14]]


@pytest.mark.parametrize(("min_tokens", "drafted"), [(0, 4), (1, 4), (2, 0), (3, 1), (5, 3), (6, 4), (50, 4)])
def test_a_draft_leaves_the_first_place_where_a_stop_token_may_come_to_the_next_step(
    min_tokens: int, drafted: int
) -> None:
    steps = Steps()
    steps.add(1, SIBLING)
    steps.add(2, [], min_tokens=min_tokens)
    assert steps.step({2: [12]}) == [[13, 14, 15, 16][:drafted]], "one token is generated"


def test_nothing_is_drafted_where_the_run_wants_none() -> None:
    steps = Steps()
    steps.add(1, SIBLING, drafts="none")
    steps.add(2, [], drafts="none")
    assert steps.step({2: [12]}) == [[]]


def test_padding_gives_every_decoding_request_as_many_draft_tokens() -> None:
    steps = Steps(padding="drafted")
    steps.add(1, SIBLING)
    for number in (2, 3, 4):
        steps.add(number, [])
    steps.requests["4"].is_over = True  # ended with this step: nothing is drafted or padded for it
    drafts = steps.step({2: [16], 3: [77], 4: [12]})
    assert drafts[0] == [17, 18, FILLER_TOKEN, FILLER_TOKEN]
    assert len(drafts[1]) == 4
    assert drafts[2] == []
    assert steps.drafting.num_filled == 4 + 4 - 2 - sum(token != FILLER_TOKEN for token in drafts[1])


def test_without_a_draft_nothing_is_padded_unless_always() -> None:
    for padding, expected in (("drafted", []), ("always", [FILLER_TOKEN] * 4)):
        steps = Steps(padding=padding)  # type: ignore[arg-type]
        steps.add(2, [])
        assert steps.step({2: [12]}) == [expected]


def test_the_budget_stops_drafts_that_do_not_pay(monkeypatch: pytest.MonkeyPatch) -> None:
    # A clock that stands still, so that steps take `took_s`.
    monkeypatch.setattr(step_drafting, "time", SimpleNamespace(perf_counter=lambda: 0.0))

    def num_drafted(fixed_tokens: int | None) -> int:
        steps = Steps(fixed_tokens=fixed_tokens)
        steps.add(1, [])
        drafted, num_batched = 0, 1
        for token in range(200):  # after 7 never twice the same: whatever is drafted there is wrong
            for sampled in (7, 1000 + token):
                (draft,) = steps.step({1: [sampled]}, took_s=0.001 * num_batched)  # a step costs what it computes
                drafted, num_batched = drafted + len(draft), 1 + len(draft)
        return drafted

    assert num_drafted(None) < num_drafted(4) / 4


def test_placeholders_become_tokens_and_drafts_stay() -> None:
    steps = Steps()
    drafts = {"0": [-1] * 4, "1": [11, 12], "2": [11, -1]}
    steps.drafting.fill_placeholders(drafts)
    assert drafts == {"0": [FILLER_TOKEN] * 4, "1": [11, 12], "2": [11, FILLER_TOKEN]}
    assert steps.drafting.num_filled == 5
