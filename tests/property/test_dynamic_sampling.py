# SPDX-License-Identifier: Apache-2.0
"""Groups chosen, dropped and replaced: the number asked for is kept exactly, and no prompt enters twice."""

from __future__ import annotations

import asyncio
import os
import random
import signal
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from faults import KillOnce
from seer import (
    Conversation,
    End,
    FinishReason,
    GroupResult,
    HostingConfig,
    Prompt,
    Reply,
    Response,
    Rollout,
    Sampling,
)
from seer.environments.base import Answer
from seer.errors import ConfigError, DeadlineExceeded, InputError
from seer.metrics.events import Dropped, Ended, Event, Queued, Started, Stopped
from seer.runs.group_supply import GroupSupply
from seer.runs.prompts import EncodedPrompt

SAMPLING = Sampling(max_tokens=40)
QUICK = HostingConfig(pin_cores=False, heartbeat_s=0.1, silence_deadline_s=2.0, progress_deadline_s=5.0)


def encoded(number: int, priority: int = 0) -> EncodedPrompt:
    prompt = Prompt(id=str(number), token_ids=(1, 2), priority=priority)
    return EncodedPrompt(prompt, (1, 2), SAMPLING, 1)


@given(
    priorities=st.lists(st.integers(-1, 1), min_size=1, max_size=30),
    enough=st.none() | st.integers(1, 12),
    is_list=st.booleans(),
    seed=st.integers(0, 10**6),
)
@settings(max_examples=200, deadline=None)
def test_the_supply_keeps_exactly_enough_and_lets_none_in_twice(
    priorities: list[int], enough: int | None, is_list: bool, seed: int
) -> None:
    dice = random.Random(seed)
    prompts = [encoded(i, priority) for i, priority in enumerate(priorities)]
    drawn = 0

    def drawing() -> Iterator[EncodedPrompt]:
        nonlocal drawn
        for prompt in prompts:
            drawn += 1
            yield prompt

    supply = GroupSupply(prompts if is_list else drawing(), enough=enough)
    open_groups: list[int] = []
    entered: list[int] = []
    while True:
        new = supply.take(nothing_waits=not open_groups or dice.random() < 0.5)
        assert all(prompt is prompts[position] for position, prompt in new)
        entered += [position for position, _ in new]
        open_groups += [position for position, _ in new]
        assert supply.num_open == len(open_groups)
        assert enough is None or supply.num_kept + supply.num_open <= enough
        assert is_list or drawn <= len(entered) + 1
        if not open_groups:
            break
        open_groups.remove(dice.choice(open_groups))
        supply.settle(is_kept=dice.random() < 0.4)
    assert supply.is_over
    assert len(entered) == len(set(entered)) == supply.num_kept + supply.num_dropped
    if enough is None:
        assert sorted(entered) == list(range(len(prompts)))
        assert not is_list or [priorities[i] for i in entered] == sorted(priorities, reverse=True)
    else:
        assert supply.num_kept == enough or len(entered) == len(prompts)


def a_rollout(step_s: float = 0.0) -> Rollout:
    return Rollout("none", engine="fake", instances=2, engine_settings={"step_s": step_s}, hosting=QUICK)


def endless() -> Iterator[Prompt]:
    number = 0
    while True:
        yield Prompt(id=f"p{number}", token_ids=(1, 2, 3 + number % 50))
        number += 1


def differ(group: GroupResult) -> bool:
    return len({response.reward for response in group.responses}) > 1


@pytest.mark.parametrize("seed", range(4))
def test_enough_groups_are_kept_under_random_rewards_and_faults(seed: int) -> None:
    async def reward(prompt: Prompt, response: Response) -> float:
        dice = random.Random(f"{seed} {prompt.id} {response.index}")
        if dice.random() < 0.1:
            raise ValueError("no reward")
        return float(dice.random() < 0.3)

    async def scenario() -> None:
        async with a_rollout(step_s=0.0005) as rollout:
            events: list[Event] = []
            kill = KillOnce(rollout.fleet.instances[seed % 2], request=6)

            def both(event: Event) -> None:
                events.append(event)
                kill(event)

            run = rollout.run(
                endless(), n=3, sampling=SAMPLING, reward=reward, keep=differ, enough_groups=7, seed=seed, events=both
            )
            kept = [group async for group in run]
            queued = {(e.group, e.index) for e in events if isinstance(e, Queued)}
            dropped = [event for event in events if isinstance(event, Dropped)]
            assert len(kept) == 7
            assert all(map(differ, kept))
            assert len(queued) == sum(isinstance(e, Queued) for e in events)
            groups = {group for group, _ in queued}
            assert sorted(groups) == sorted([g.group for g in kept] + [event.group for event in dropped])
            assert len({g.prompt_id for g in kept}) == 7
            assert rollout.summary is not None
            assert rollout.summary.dropped_groups == len(dropped)
            assert rollout.summary.dropped_tokens == sum(event.num_tokens for event in dropped)
            assert rollout.fleet.num_lost <= 1

    asyncio.run(scenario())


class KillSometimes:
    """Kills a random instance that is up whenever one of the drawn numbers of chunks has ended."""

    def __init__(self, rollout: Rollout, dice: random.Random) -> None:
        self._rollout, self._dice = rollout, dice
        self._when = {dice.randrange(2, 60) for _ in range(dice.randint(1, 3))}
        self._num_stopped = 0
        self.num_kills = 0

    def __call__(self, event: Event) -> None:
        if not isinstance(event, Stopped):
            return
        self._num_stopped += 1
        up = [one for one in self._rollout.fleet.instances if one.is_up]
        if self._num_stopped in self._when and up:
            victim = self._dice.choice(up)
            assert victim.pid is not None
            os.kill(victim.pid, signal.SIGKILL)
            self.num_kills += 1


def test_enough_groups_are_kept_while_tools_fail_and_instances_die_again_and_again() -> None:
    """Twelve random runs on one fleet: random group sizes, numbers of groups, rewards, tool failures and kills."""
    hosting = replace(QUICK, max_restarts=1000, restart_pause_s=0.0)

    async def one(rollout: Rollout, seed: int) -> int:
        dice = random.Random(seed)
        n, enough, fails = dice.randint(2, 4), dice.randint(1, 6), dice.choice((0.0, 0.2))

        async def environment(conversation: Conversation) -> Answer:
            own = random.Random(f"{seed} {conversation.prompt_id} {conversation.index} {conversation.turn}")
            if own.random() < fails:
                raise RuntimeError("the tool is down")
            if conversation.turn == 2 or conversation.finish_reason is FinishReason.LENGTH:
                return End(reward=float(own.random() < 0.4))
            return Reply(token_ids=[5, 6])

        kills, events = KillSometimes(rollout, dice), []

        def both(event: Event) -> None:
            events.append(event)
            kills(event)

        run = rollout.run(
            endless(), n=n, sampling=SAMPLING, environment=environment, keep=differ, enough_groups=enough, events=both
        )
        kept = [group async for group in run]
        check_choice(kept, events, rollout, enough)
        return kills.num_kills

    async def scenario() -> int:
        engine: dict[str, Any] = {"engine": "fake", "engine_settings": {"step_s": 0.0005}, "hosting": hosting}
        async with Rollout("none", instances=3, **engine) as rollout:
            return sum([await one(rollout, seed) for seed in range(12)])

    assert asyncio.run(scenario()) >= 8, "faults were meant to happen"


def check_choice(kept: list[GroupResult], events: list[Event], rollout: Rollout, enough: int) -> None:
    """The number that was asked for, each prompt once, and all that was not kept counted."""
    queued = [(event.group, event.index) for event in events if isinstance(event, Queued)]
    dropped = [event for event in events if isinstance(event, Dropped)]
    assert len(kept) == enough == len({group.prompt_id for group in kept})
    assert all(map(differ, kept))
    assert len(queued) == len(set(queued))
    assert sorted({group for group, _ in queued}) == sorted([g.group for g in kept] + [one.group for one in dropped])
    ended = {event.request: event.num_generated for event in events if isinstance(event, Ended)}
    group_of = {event.request: event.group for event in events if isinstance(event, Queued)}
    for one in dropped:
        assert one.num_tokens == sum(tokens for request, tokens in ended.items() if group_of[request] == one.group)
    summary = rollout.summary
    assert summary is not None
    assert summary.dropped_groups == len(dropped)
    assert summary.dropped_tokens == sum(one.num_tokens for one in dropped)
    assert (summary.dropped_request_s > 0) == bool(dropped)


def run(**options: Any) -> tuple[list[GroupResult], list[Event]]:
    events: list[Event] = []

    async def scenario() -> list[GroupResult]:
        async with a_rollout() as rollout:
            prompts = options.pop("prompts", None) or [[1, 2, 3 + i] for i in range(6)]
            on_response = options.pop("on_response", None)
            asked = rollout.run(
                prompts,
                n=3,
                sampling=SAMPLING,
                events=events.append,
                on_response=None if on_response is None else lambda response: on_response(rollout, response),
                **options,
            )
            return [group async for group in asked]

    return asyncio.run(scenario()), events


def test_when_prompts_run_out_what_was_kept_is_what_there_is() -> None:
    found, events = run(enough_groups=5, keep=lambda group: group.group % 2 == 0)
    assert sorted(group.group for group in found) == [0, 2, 4]
    assert {event.group for event in events if isinstance(event, Dropped)} == {1, 3, 5}


def test_late_prompts_have_the_ids_and_the_places_that_they_have_in_a_list() -> None:
    given: list[Any] = [[1, 2], Prompt(token_ids=(3, 4), id="mine"), [5, 6]]
    of_list, _ = run(prompts=given, enough_groups=3)
    late, _ = run(prompts=iter(given), enough_groups=3)
    assert {group.group: group.prompt_id for group in late} == {0: "0", 1: "mine", 2: "2"}
    assert {group.prompt_id for group in of_list} == {group.prompt_id for group in late}
    with pytest.raises(InputError, match="prompt 2: "):
        run(prompts=iter([[1, 2], [3, 4], 5]), enough_groups=3)
    with pytest.raises(InputError, match="prompt 1: the model has no tokenizer"):
        run(prompts=iter([[1, 2], "text"]), enough_groups=3)


def test_as_many_groups_run_as_are_still_to_be_kept() -> None:
    found, events = run(enough_groups=2)
    assert len(found) == 2
    assert {event.group for event in events if isinstance(event, Queued)} == {0, 1}


def test_a_group_that_is_settled_can_be_stopped_from_a_callback() -> None:
    seen: list[tuple[int, int]] = []

    def on_response(rollout: Rollout, response: Response) -> None:
        seen.append((response.group, response.index))
        if response.is_complete and response.group == 0:
            rollout.stop_group(0)

    found, _ = run(on_response=on_response, reward=lambda prompt, response: 1.0)
    assert sorted(seen) == [(group, index) for group in range(6) for index in range(3)]
    first = next(group for group in found if group.group == 0)
    assert any(response.is_complete for response in first.responses)
    others = [response for group in found if group.group for response in group.responses]
    assert all(response.is_complete and response.reward == 1.0 for response in others)


def test_prompts_of_a_higher_priority_start_first() -> None:
    prompts = [Prompt(id=str(i), token_ids=(1, 2, 3 + i), priority=i % 3) for i in range(9)]
    found, events = run(prompts=prompts)
    assert len(found) == 9
    group_of = {event.request: event.group for event in events if isinstance(event, Queued)}
    firsts: list[int] = []
    for event in events:
        if isinstance(event, Started) and event.moved_from is None:
            firsts.append(prompts[group_of[event.request]].priority)
    assert firsts == sorted(firsts, reverse=True)


def test_errors_in_keep_and_in_late_prompts_end_the_run() -> None:
    def broken(group: GroupResult) -> bool:
        raise ZeroDivisionError("keep")

    with pytest.raises(ZeroDivisionError, match="keep"):
        run(keep=broken)

    with pytest.raises(InputError, match=r"keep .*lambda> answered None"):
        run(prompts=endless(), enough_groups=2, keep=lambda group: None)

    async def slow(group: GroupResult) -> bool:
        await asyncio.Event().wait()
        return True

    with pytest.raises(DeadlineExceeded, match=r"keep .*slow of prompt \d took longer than 0.05 s"):
        run(keep=slow, keep_deadline_s=0.05)
    with pytest.raises(InputError, match="bad prompts"):
        run(prompts=iter([[1, 2], [3, 4], "text"]), enough_groups=2, keep=lambda group: False)
    with pytest.raises(ConfigError, match="no prompts"):
        run(prompts=iter([]), enough_groups=2)
    with pytest.raises(ConfigError, match="enough_groups"):
        run(enough_groups=0)


def test_a_journal_needs_to_know_all_prompts(tmp_path: Any) -> None:
    with pytest.raises(ConfigError, match="iterator"):
        run(prompts=endless(), enough_groups=2, journal=tmp_path / "journal")
    found, _ = run(enough_groups=2, journal=tmp_path / "journal")
    again, events = run(enough_groups=2, journal=tmp_path / "journal", resume=True)
    tokens = [[r.token_ids for r in group.responses] for group in sorted(found, key=lambda group: group.group)]
    assert tokens == [[r.token_ids for r in g.responses] for g in sorted(again, key=lambda group: group.group)]
    assert not any(isinstance(event, Started) for event in events)
