# SPDX-License-Identifier: Apache-2.0
"""The Python API over instances in child processes; the fake engine, so no weights and no torch."""

from __future__ import annotations

import asyncio
import functools
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from faults import KillOnce
from seer import (
    FinishReason,
    GroupResult,
    HostingConfig,
    Prompt,
    Response,
    Rollout,
    Sampling,
    SyncRollout,
    rollout_sync,
)
from seer.errors import ConfigError, InputError, InstanceError
from seer.metrics.events import Decoding, Ended, Event, Stopped
from seer.runs.journal import Journal

PROMPTS = [[1, 2, 3 + i] for i in range(8)]
SAMPLING = Sampling(max_tokens=120)
QUICK = HostingConfig(pin_cores=False, heartbeat_s=0.1, silence_deadline_s=2.0, progress_deadline_s=5.0)
Tokens = dict[tuple[int, int], list[int]]


def a_rollout(instances: int = 2, **settings: Any) -> Rollout:
    engine_settings = {"step_s": settings.pop("step_s", 0.0)}
    settings.setdefault("hosting", QUICK)
    return Rollout("none", engine="fake", instances=instances, engine_settings=engine_settings, **settings)


def tokens_of(groups: list[GroupResult]) -> Tokens:
    return {(r.group, r.index): r.token_ids for group in groups for r in group.responses}


async def rolled_out(rollout: Rollout, **settings: Any) -> list[GroupResult]:
    return [group async for group in rollout.run(PROMPTS, n=4, sampling=SAMPLING, **settings)]


@functools.cache
def undisturbed() -> Tokens:
    async def scenario() -> Tokens:
        async with a_rollout(1, scheduler="verl") as rollout:
            return tokens_of(await rolled_out(rollout))

    return asyncio.run(scenario())


def test_every_response_comes_back_whole() -> None:
    async def scenario() -> None:
        async with a_rollout() as rollout:
            groups = await rolled_out(rollout)
            assert sorted(group.group for group in groups) == list(range(8))
            for group in groups:
                assert group.is_complete
                for response in group.responses:
                    assert len(response.token_ids) == len(response.logprobs) == response.num_tokens > 0
                    assert response.finish_reason in (FinishReason.STOP, FinishReason.LENGTH)
                    assert response.text is None
                    assert response.finished_s >= 0
            assert rollout.summary is not None
            assert rollout.summary.num_requests == 32

    asyncio.run(scenario())


@pytest.mark.parametrize("scheduler", ["verl-sync", "verl", "group", "divided", "context", "seer"])
def test_the_scheduler_changes_no_token(scheduler: str) -> None:
    async def scenario() -> Tokens:
        async with a_rollout(3, scheduler=scheduler) as rollout:
            return tokens_of(await rolled_out(rollout))

    assert asyncio.run(scenario()) == undisturbed()


def test_seeds_change_tokens_and_prompts_may_bring_their_own() -> None:
    async def scenario() -> None:
        async with a_rollout() as rollout:
            first, again, other = [tokens_of(await rolled_out(rollout, seed=seed)) for seed in (1, 1, 2)]
            assert first == again != other
            own = Prompt(token_ids=(1, 2), id="own", seed=5, n=2)
            runs = [tokens_of([g async for g in rollout.run([own], sampling=SAMPLING, seed=s)]) for s in (1, 2)]
            assert runs[0] == runs[1]
            assert len(runs[0]) == 2

    asyncio.run(scenario())


def test_killing_an_instance_loses_and_doubles_nothing() -> None:
    async def scenario() -> tuple[Tokens, int]:
        async with a_rollout(2, step_s=0.001) as rollout:
            victim = rollout.fleet.instances[0]

            # Some way into the run: the victim has chunks in hand and has delivered others.
            groups = await rolled_out(rollout, events=KillOnce(victim, request=3))
            return tokens_of(groups), rollout.fleet.num_lost

    tokens, num_lost = asyncio.run(scenario())
    assert num_lost >= 1
    assert tokens == undisturbed()


def test_an_instance_that_dies_at_once_is_restarted_and_used(tmp_path: Path) -> None:
    async def scenario() -> Tokens:
        rollout = a_rollout(1, hosting=replace(QUICK, log_dir=tmp_path))
        object.__setattr__(rollout.engine, "factory", "host_fakes:make_crashing_once")
        async with rollout:
            return tokens_of(await rolled_out(rollout))

    assert asyncio.run(scenario()) == undisturbed()


@pytest.mark.parametrize("full", [(1,), (0, 1)])
def test_an_instance_that_alone_cannot_take_new_weights_is_started_again_with_them(
    tmp_path: Path, full: tuple[int, ...]
) -> None:
    async def scenario() -> tuple[Tokens, list[int], int]:
        rollout = a_rollout(hosting=replace(QUICK, log_dir=tmp_path))
        object.__setattr__(rollout.engine, "factory", "host_fakes:make_full")
        for id in full:
            (tmp_path / f"full-{id}").touch()
        async with rollout:
            if len(full) == 2:  # what no instance can take is refused, and none is lost for it
                with pytest.raises(InstanceError, match="no memory for new weights"):
                    await rollout.update_weights(tmp_path)
            else:
                await rollout.update_weights(tmp_path)
                await rollout.fleet.wait_until_up()
            versions = [status.weights_version for status in rollout.fleet.view()]
            return tokens_of(await rolled_out(rollout)), versions, rollout.fleet.num_lost

    tokens, versions, num_lost = asyncio.run(scenario())
    assert tokens == undisturbed()
    assert (versions, num_lost) == (([1, 1], 1) if len(full) == 1 else ([0, 0], 0))


def test_when_no_instance_is_left_the_run_says_so() -> None:
    async def scenario() -> None:
        hosting = HostingConfig(pin_cores=False, max_restarts=1)
        rollout = a_rollout(1, hosting=hosting)
        object.__setattr__(rollout.engine, "factory", "host_fakes:make_crashing")
        async with rollout:
            with pytest.raises(InstanceError, match="no instance is left"):
                await rolled_out(rollout)
            with pytest.raises(InstanceError, match="no instance is left"):
                await rolled_out(rollout)

    asyncio.run(scenario())


def test_cancelling_hands_out_what_was_generated() -> None:
    expected = undisturbed()

    async def scenario() -> None:
        async with a_rollout(step_s=0.002) as rollout:
            groups = []
            async for group in rollout.run(PROMPTS, n=4, sampling=Sampling(max_tokens=2000)):
                groups.append(group)
                rollout.cancel()
            assert sorted(group.group for group in groups) == list(range(8))
            reasons = {response.finish_reason for group in groups for response in group.responses}
            assert FinishReason.CANCELLED in reasons
            cut = [r for g in groups for r in g.responses if r.finish_reason is FinishReason.CANCELLED]
            assert any(response.token_ids for response in cut)
            assert all(len(r.token_ids) == len(r.logprobs) == r.num_tokens for r in cut)
            assert tokens_of(await rolled_out(rollout)) == expected  # the fleet is as good as new

    asyncio.run(scenario())


def test_leaving_the_iteration_ends_the_run_and_frees_the_fleet() -> None:
    expected = undisturbed()

    async def scenario() -> None:
        async with a_rollout(step_s=0.002) as rollout:
            groups = rollout.run(PROMPTS, n=4, sampling=Sampling(max_tokens=2000))
            async for _ in groups:
                break
            await groups.aclose()  # type: ignore[attr-defined]
            assert tokens_of(await rolled_out(rollout)) == expected

    asyncio.run(scenario())


def test_a_slow_consumer_does_not_hold_generation_up() -> None:
    async def scenario() -> None:
        async with a_rollout() as rollout:
            ends = 0
            all_ended = asyncio.Event()

            def count(event: Event) -> None:
                nonlocal ends
                ends += isinstance(event, Ended)
                if ends == 32:
                    all_ended.set()

            async for _ in rollout.run(PROMPTS, n=4, sampling=SAMPLING, events=count):
                async with asyncio.timeout(30):
                    await all_ended.wait()  # the first group is still being looked at

    asyncio.run(scenario())


def test_rewards_are_computed_while_others_still_run() -> None:
    seen: list[tuple[str, int]] = []

    async def reward(prompt: Prompt, response: Response) -> float:
        seen.append((prompt.id, response.index))
        await asyncio.sleep(0)
        return float(response.num_tokens)

    async def scenario() -> None:
        async with a_rollout() as rollout:
            groups = await rolled_out(rollout, reward=reward)
            assert all(r.reward == r.num_tokens and r.reward_error is None for g in groups for r in g.responses)

    asyncio.run(scenario())
    assert len(seen) == 32


@pytest.mark.parametrize("is_async", [True, False])
def test_slow_and_failing_rewards_are_named_and_stall_nothing(is_async: bool) -> None:
    never = asyncio.Event()

    def judge(prompt: Prompt, response: Response) -> float:
        if response.index == 1:
            raise ValueError("no opinion")
        if response.index == 3:
            sys.exit("no more")
        return 1.0

    async def slow_judge(prompt: Prompt, response: Response) -> float:
        if response.index == 2:
            await never.wait()
        return judge(prompt, response)

    async def scenario() -> list[GroupResult]:
        async with a_rollout() as rollout:
            function: Callable[..., Any] = slow_judge if is_async else judge
            return await rolled_out(rollout, reward=function, reward_deadline_s=0.2)

    for group in asyncio.run(scenario()):
        assert group.responses[0].reward == 1.0
        assert "judge of prompt" in (group.responses[1].reward_error or "")
        assert "ValueError: no opinion" in (group.responses[1].reward_error or "")
        assert "SystemExit: no more" in (group.responses[3].reward_error or "")
        if is_async:
            assert "took longer than 0.2 s" in (group.responses[2].reward_error or "")


def test_an_weights_version_advances_with_the_weights_and_lengths_may_be_carried(tmp_path: Path) -> None:
    async def scenario() -> None:
        async with a_rollout() as rollout:
            first = await rolled_out(rollout)
            assert rollout.current is not None
            spread = rollout.current._options.spread
            assert spread.known.num > 0
            assert await rollout.update_weights(tmp_path, keep_context=True) == 1
            second = await rolled_out(rollout)
            assert {r.weights_version for g in first for r in g.responses} == {0}
            assert {r.weights_version for g in second for r in g.responses} == {1}
            assert rollout.current is not None
            longest = max(r.num_tokens for g in first if g.group == 0 for r in g.responses)
            assert rollout.current._options.length_hints is not None
            assert rollout.current._options.length_hints["0"] == longest
            assert rollout.current._options.spread is spread  # how far groups outgrow their first finish

    asyncio.run(scenario())


def test_forced_lengths_are_what_comes_out_and_the_oracle_may_know_them() -> None:
    lengths = [[10 + g, 20, 30, 40 + g] for g in range(8)]

    async def scenario() -> None:
        async with a_rollout() as rollout:
            for scheduler in ("verl", "seer", "oracle"):
                groups = await rolled_out(rollout, lengths=lengths, scheduler=scheduler)
                assert {g.group: [r.num_tokens for r in g.responses] for g in groups} == dict(enumerate(lengths))
            with pytest.raises(ConfigError, match="needs to know every length"):
                await rolled_out(rollout, scheduler="oracle")
            with pytest.raises(ConfigError, match="lengths of prompt 0"):
                await rolled_out(rollout, lengths=[[1000] * 4] * 8)

    asyncio.run(scenario())


def test_a_journal_restores_a_run_that_was_cut(tmp_path: Path) -> None:
    async def cut_short() -> int:
        async with a_rollout(step_s=0.001) as rollout:
            ends = 0

            def cut(event: Event) -> None:
                nonlocal ends
                ends += isinstance(event, Ended)
                if ends == 6:
                    rollout.cancel()

            await rolled_out(rollout, journal=tmp_path / "j", events=cut)
            return ends

    async def resumed() -> tuple[Tokens, int]:
        generated = 0
        async with a_rollout() as rollout:

            def count(event: Event) -> None:
                nonlocal generated
                generated += isinstance(event, Stopped)

            groups = await rolled_out(rollout, journal=tmp_path / "j", resume=True, events=count)
            return tokens_of(groups), generated

    asyncio.run(cut_short())
    tokens, _ = asyncio.run(resumed())
    assert tokens == undisturbed()
    tokens, num_chunks = asyncio.run(resumed())
    assert tokens == undisturbed()
    assert num_chunks == 0  # all of it came from the journal


def test_the_synchronous_twin_gives_the_same() -> None:
    with SyncRollout("none", engine="fake", instances=2, hosting=QUICK) as rollout:
        first = list(rollout.run(PROMPTS, n=4, sampling=SAMPLING))
        assert rollout.update_weights(Path("anywhere")) == rollout.weights_version == 1
        second = list(rollout.run(PROMPTS, n=4, sampling=SAMPLING))
    assert tokens_of(first) == tokens_of(second) == undisturbed()
    groups = rollout_sync("none", PROMPTS, n=4, sampling=SAMPLING, engine="fake", hosting=QUICK)
    assert [group.group for group in groups] == list(range(8))
    assert tokens_of(groups) == undisturbed()


def test_the_synchronous_twin_passes_errors_on_and_ends_its_thread() -> None:
    with pytest.raises(ConfigError):
        rollout_sync("none", PROMPTS, engine="fake", instances=0)
    with (
        SyncRollout("none", engine="fake", hosting=QUICK) as rollout,
        pytest.raises(InputError, match="bad prompts"),
    ):
        list(rollout.run(["", "text"]))


@pytest.mark.parametrize(
    ("settings", "why"),
    [
        ({"instances": 0}, "instances=0"),
        ({"engine": "fak"}, "unknown engine"),
        ({"scheduler": "sear"}, "unknown scheduler"),
        ({"pool": "lake"}, "unknown pool"),
        ({"speculation": "on"}, "speculation="),
    ],
)
def test_impossible_settings_are_refused_before_anything_starts(settings: dict[str, Any], why: str) -> None:
    with pytest.raises(ConfigError, match=why):
        Rollout("none", **({"engine": "fake"} | settings))


def test_unused_events_are_passed_through() -> None:
    kinds: set[type] = set()

    async def scenario() -> None:
        async with a_rollout() as rollout:
            await rolled_out(rollout, events=lambda event: kinds.add(type(event)))

    asyncio.run(scenario())
    assert {kind.__name__ for kind in kinds} >= {"Queued", "Started", "Stopped", "Ended", "InstanceState"}
    assert Decoding not in kinds


def test_a_journal_that_another_run_writes_is_refused_and_so_is_what_cannot_run(tmp_path: Path) -> None:
    async def scenario() -> None:
        async with a_rollout() as rollout:
            await rolled_out(rollout, journal=tmp_path / "j")
            whole = (tmp_path / "j").read_bytes()
            encoded = rollout.encode(PROMPTS, n=4, sampling=SAMPLING)
            other = Journal.resume(tmp_path / "j", rollout.identity(encoded))
            with pytest.raises(InputError, match="in use"):
                await rolled_out(rollout, journal=tmp_path / "j")
            other.close()
            with pytest.raises(ConfigError, match="lengths"):
                await rolled_out(rollout, journal=tmp_path / "j", lengths=[])
            assert (tmp_path / "j").read_bytes() == whole, "it was emptied before the settings were checked"
            await rolled_out(rollout, journal=tmp_path / "j")

    asyncio.run(scenario())


def test_encoded_and_plain_prompts_may_be_mixed_and_none_is_dropped() -> None:
    async def scenario() -> None:
        async with a_rollout() as rollout:
            plain = await rolled_out(rollout)
            encoded = rollout.encode(PROMPTS, n=4, sampling=SAMPLING)
            mixed = [encoded[i] if i % 2 else prompt for i, prompt in enumerate(PROMPTS)]
            groups = [group async for group in rollout.run(mixed, n=4, sampling=SAMPLING)]
            assert tokens_of(groups) == tokens_of(plain)
            assert {group.prompt_id for group in groups} == {group.prompt_id for group in plain}

    asyncio.run(scenario())
