# SPDX-License-Identifier: Apache-2.0
"""The driver of verl's rollouts over stand-ins of its servers: groups, weights, deaths."""

from __future__ import annotations

import asyncio
import errno
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import msgspec
import pytest

from seer.cli.main import main
from seer.errors import ConfigError, InstanceError
from seer.integrations.verl import gathering, server_fleet
from seer.integrations.verl.driver import MAX_TRIES, SeerDriver
from seer.integrations.verl.requests import Generated, GenerateRequest
from seer.integrations.verl.settings import VerlSettings
from seer.integrations.verl.step_record import StepRecord
from seer.metrics.events import Ended, Queued
from seer.metrics.jsonl import EventLog
from seer.runs.run_folder import RunFolder
from seer.runs.training_run import TrainingRun
from seer.types import InstanceLimits, Sampling
from verl_servers import StandInServer
from within import within

SAMPLING = Sampling(max_tokens=200, ignore_eos=True)


class Job:
    """A driver and its servers, which begin with the weights of step `synced`."""

    def __init__(
        self,
        folder: Path,
        num_servers: int = 2,
        *,
        synced: int = 1,
        seed: int = 0,
        scheduler: str = "seer",
        chunk_tokens: int | None = 32,
        response_tokens: int | None = None,
        **server: Any,
    ) -> None:
        settings = VerlSettings(
            scheduler=scheduler, chunk_tokens=chunk_tokens, run_dir=folder / "run", stall_deadline_s=20.0
        )
        self.driver = SeerDriver(
            settings,
            num_servers=num_servers,
            node="here",
            address="",
            run_dir="",
            model="fake",
            seed=seed,
            response_tokens=response_tokens,
        )
        self.synced = synced
        self.servers = [StandInServer(rank, **{"max_num_seqs": 4} | server) for rank in range(num_servers)]

    async def __aenter__(self) -> Job:
        for rank, server in enumerate(self.servers):
            await self.driver.add_server(rank, server, "here")
        await self.sync(self.synced)
        return self

    async def __aexit__(self, kind: type[BaseException] | None, *_: Any) -> None:
        if kind is None:  # a test that failed says why: closing may fail, or wait, for the same reason
            await self.driver.close()

    async def restart(self, rank: int) -> None:
        self.servers[rank] = StandInServer(rank, max_num_seqs=4)
        await self.driver.add_server(rank, self.servers[rank], "here")

    async def sync(self, weights_version: int) -> None:
        for server in self.servers:
            if not server.died.is_set():
                await server.sync(weights_version)

    async def generate(
        self,
        group: str,
        n: int = 1,
        *,
        prompt: tuple[int, ...] = (5, 6, 7),
        request_id: str = "",
        sampling: Sampling = SAMPLING,
    ) -> Generated:
        request = GenerateRequest(group=group, num_siblings=n, prompt=prompt, sampling=sampling, request_id=request_id)
        return msgspec.msgpack.decode(await self.driver.generate(msgspec.msgpack.encode(request)), type=Generated)

    async def rollout(self, step: int, *, groups: int = 4, n: int = 4, is_validation: bool = False) -> list[Generated]:
        await self.driver.begin_rollout(step, is_validation)
        asked = [self.generate(f"{step}-{group}", n) for group in range(groups) for _ in range(n)]
        return list(await asyncio.gather(*asked))


@within(30)
async def test_every_response_of_a_rollout_comes_back_under_the_newest_weights(tmp_path: Path) -> None:
    async with Job(tmp_path) as job:
        for step in (1, 2):
            made = await job.rollout(step)
            assert [len(one.token_ids) for one in made] == [200] * 16
            assert {one.weights_version for one in made} == {step}
            assert len({tuple(one.token_ids) for one in made}) == 16, "siblings have seeds of their own"
            await job.sync(step + 1)
        assert job.servers[0].instance.runs == [("grouped", 1), ("grouped", 2)]


@within(30)
async def test_the_numbers_of_a_step_are_those_of_its_training_rollout(tmp_path: Path) -> None:
    async with Job(tmp_path) as job:
        await job.rollout(1)
        await job.sync(2)  # verl validates with the weights of the step that it has just trained
        await job.rollout(1, groups=1, n=1, is_validation=True)
        numbers = await job.driver.finish_step(1, {"critic/score/mean": 0.5})
        assert numbers["responses"] == 16
        assert numbers["weights_version"] == 1
        assert numbers["tokens"] == 16 * 200
        assert numbers["chunks"] >= 16
        assert numbers["servers_up"] == 2
    assert {path.name for path in (tmp_path / "run").iterdir()} == {
        *("run.json", "rollouts.jsonl", "trainer.jsonl", "step-000001", "step-000001-val")
    }
    assert main(["report", str(tmp_path / "run")]) == 0
    assert "Reward" in (tmp_path / "run/report.html").read_text()


@within(30)
async def test_unlike_servers_are_recorded_and_replayed_each_with_its_limits(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    replayed: list[Sequence[InstanceLimits]] = []

    def replay(record: StepRecord, limits: Sequence[InstanceLimits], chunk_tokens: int | None) -> dict[str, float]:
        replayed.append(limits)
        return {}

    monkeypatch.setattr(StepRecord, "replay", replay)

    job = Job(tmp_path)
    job.servers[1] = StandInServer(1, max_num_seqs=2)
    async with job:
        await job.rollout(1)
        await job.driver.finish_step(1, {})
    assert [[one.max_num_seqs for one in limits] for limits in replayed] == [[4, 2]]
    for folder in (tmp_path / "run", tmp_path / "run/step-000001"):
        recorded = RunFolder(folder).read_facts().limits_of_all(2)
        assert [one.max_num_seqs for one in recorded] == [4, 2]


@within(30)
async def test_siblings_that_are_asked_for_one_by_one_are_one_group(tmp_path: Path) -> None:
    async with Job(tmp_path) as job:
        await job.rollout(1, groups=2, n=4)
        assert Counter(_groups(job)) == {0: 4, 1: 4}


@within(30)
async def test_a_later_turn_joins_the_group_of_its_prompt(tmp_path: Path) -> None:
    async with Job(tmp_path) as job:
        await job.driver.begin_rollout(1, False)
        first = await job.generate("a")
        await job.generate("b")
        await job.generate("a", prompt=(5, 6, 7, *first.token_ids, 9, 9))
        assert _groups(job) == [0, 1, 0]


@pytest.mark.parametrize("scheduler", ["seer", "verl"])
@within(30)
async def test_a_later_turn_runs_where_its_history_is_and_computes_only_what_is_new(
    tmp_path: Path, scheduler: str
) -> None:
    given = (9, 9, 9)

    async def conversation(job: Job, name: str) -> None:
        history: tuple[int, ...] = (ord(name), 6, 7)
        for _ in range(3):
            made = await job.generate(name, prompt=history, request_id=name, sampling=Sampling(max_tokens=8))
            history += (*made.token_ids, *given)

    async with Job(tmp_path, scheduler=scheduler, max_num_seqs=64) as job:
        await job.driver.begin_rollout(1, False)
        await asyncio.gather(*(conversation(job, name) for name in "abcdefgh"))
        computed = [new for server in job.servers for new in server.instance.computed]
        assert sorted(computed, reverse=True) == [*((ord(name), 6, 7) for name in "hgfedcba"), *[given] * 16]
        assert all(server.instance.computed for server in job.servers), "all of it ran on one server"


@within(30)
async def test_a_later_turn_does_not_wait_for_siblings(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gathering, "GATHER_S", 0.0)
    async with Job(tmp_path) as job:
        await job.driver.begin_rollout(1, False)
        first = await job.generate("a", 2, request_id="one")
        monkeypatch.setattr(gathering, "GATHER_S", 3600.0)
        await job.generate("a", 2, prompt=(5, 6, 7, *first.token_ids, 9), request_id="one")


@within(30)
async def test_further_prompts_of_a_rollout_join_it_without_asking_the_servers(tmp_path: Path) -> None:
    async with Job(tmp_path) as job:
        first = asyncio.create_task(job.rollout(1))
        await job.servers[0].has_work.wait()
        asked = [server.num_questions for server in job.servers]
        await job.rollout(1, groups=1)  # dynamic sampling replaces a group that it dropped
        await first
        assert [server.num_questions for server in job.servers] == asked
        assert (await job.driver.finish_step(1, {}))["responses"] == 20


@within(30)
async def test_a_server_that_dies_in_the_middle_loses_no_response(tmp_path: Path) -> None:
    async with Job(tmp_path, step_s=0.001) as job:
        rollout = asyncio.create_task(job.rollout(1))
        await job.servers[1].has_work.wait()
        job.servers[1].kill()
        assert [len(one.token_ids) for one in await rollout] == [200] * 16
        assert (await job.driver.finish_step(1, {}))["servers_lost"] == 1


@within(30)
async def test_a_restarted_server_takes_part_once_it_has_the_newest_weights(tmp_path: Path) -> None:
    async with Job(tmp_path) as job:
        await job.rollout(1)
        job.servers[1].kill()
        await job.sync(2)
        await job.restart(1)  # too late for the sync of step 2
        assert {one.weights_version for one in await job.rollout(2)} == {2}
        assert not job.servers[1].instance.runs, "it has the weights that it was started with"
        await job.sync(3)
        await job.rollout(3)
        assert job.servers[1].instance.runs == [("grouped", 3)]


@within(30)
async def test_when_no_server_is_left_every_call_fails_and_so_does_the_training(tmp_path: Path) -> None:
    async with Job(tmp_path, step_s=0.001) as job:
        await job.driver.begin_rollout(1, False)
        asked = [asyncio.create_task(job.generate("a", 4)) for _ in range(4)]
        await job.servers[0].has_work.wait()
        for server in job.servers:
            server.kill()
        for answer in await asyncio.gather(*asked, return_exceptions=True):
            assert isinstance(answer, InstanceError)
            assert "no rollout server is left" in str(answer)
        with pytest.raises(InstanceError, match=r"4 responses of rollout 000001 were lost.*no rollout server is left"):
            await job.driver.check_rollout()
        for rank in range(2):
            await job.restart(rank)
        await job.sync(2)
        with pytest.raises(InstanceError, match="4 responses"):
            await job.driver.begin_rollout(2, False)
        assert (await job.driver.finish_step(1, {}))["failed_responses"] == 4


@within(30)
async def test_what_a_broken_session_did_not_answer_is_asked_for_again(tmp_path: Path) -> None:
    async with Job(tmp_path, step_s=0.001) as job:
        rollout = asyncio.create_task(job.rollout(1))
        await job.servers[1].has_work.wait()
        broken = job.driver._session
        assert broken is not None
        broken._break(InstanceError("the loop is broken"))
        made = await rollout
        assert [len(one.token_ids) for one in made] == [200] * 16
        assert len({tuple(one.token_ids) for one in made}) == 16, "a sibling was repeated"
        assert job.driver._session is not broken
        await job.driver.check_rollout()
        numbers = await job.driver.finish_step(1, {})
        assert numbers["responses"] == 16
        assert numbers["failed_responses"] == 0
    assert main(["report", str(tmp_path / "run")]) == 0


@within(30)
async def test_a_session_that_broke_between_prompts_of_a_rollout_is_replaced(tmp_path: Path) -> None:
    async with Job(tmp_path) as job:
        await job.rollout(1)
        assert job.driver._session is not None
        job.driver._session._break(InstanceError("the loop is broken"))
        await job.rollout(1, groups=1)  # dynamic sampling
        numbers = await job.driver.finish_step(1, {})
        assert numbers["responses"] == 20
    assert job.driver._record is not None
    assert len({event.request for event in job.driver._record._replayed if isinstance(event, Ended)}) == 20


@within(30)
async def test_a_session_that_breaks_each_time_is_given_up(tmp_path: Path) -> None:
    async with Job(tmp_path, num_servers=1, step_s=0.001) as job:
        await job.driver.begin_rollout(1, False)
        asked = asyncio.create_task(job.generate("a"))
        for _ in range(MAX_TRIES):
            await job.servers[0].has_work.wait()
            job.servers[0].has_work.clear()
            assert job.driver._session is not None
            job.driver._session._break(InstanceError("again"))
        with pytest.raises(InstanceError, match="again"):
            await asked


@within(30)
async def test_a_server_whose_old_chunks_do_not_end_is_lost(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(server_fleet, "SETTLE_DEADLINE_S", 0.2)
    async with Job(tmp_path, step_s=0.001) as job:
        rollout = asyncio.create_task(job.rollout(1))
        await job.servers[1].has_work.wait()
        monkeypatch.setattr(job.servers[1].instance, "abort", lambda request: None)
        await job.servers[1].instance.pause()
        assert job.driver._session is not None
        job.driver._session._break(InstanceError("the loop is broken"))
        assert [len(one.token_ids) for one in await rollout] == [200] * 16
        assert job.driver._fleet.num_lost == 1


@within(30)
async def test_a_request_that_an_agent_loop_could_not_send_is_lost_too(tmp_path: Path) -> None:
    async with Job(tmp_path) as job:
        await job.rollout(1)
        await job.driver.note_failure("prompts with images are not supported")
        with pytest.raises(InstanceError, match="images"):
            await job.driver.check_rollout()


@within(30)
async def test_the_seed_of_the_rollout_changes_what_is_sampled(tmp_path: Path) -> None:
    async def first_tokens(folder: Path, seed: int) -> list[int]:
        async with Job(folder, seed=seed) as job:
            await job.driver.begin_rollout(1, False)
            return (await job.generate("a")).token_ids

    seeds = [await first_tokens(tmp_path / str(number), seed) for number, seed in enumerate((42, 42, 43))]
    assert seeds[0] == seeds[1] != seeds[2]


@within(30)
async def test_weights_that_are_not_those_of_the_step_are_refused(tmp_path: Path) -> None:
    async with Job(tmp_path) as job:
        await job.rollout(1)
        with pytest.raises(InstanceError, match="step 2 needs weights version 2, the servers hold 1"):
            await job.driver.begin_rollout(2, False)
        with pytest.raises(InstanceError, match="step 1 needs weights version 2, the servers hold 1"):
            await job.driver.begin_rollout(1, True)


@within(30)
async def test_versions_do_not_go_back(tmp_path: Path) -> None:
    async with Job(tmp_path, synced=2) as job:
        await job.rollout(2)
        for rank in range(2):
            job.servers[rank].kill()
            await job.restart(rank)
        await job.sync(1)
        with pytest.raises(InstanceError, match="version 1, the last rollout had 2"):
            await job.driver.begin_rollout(3, False)


@within(30)
async def test_when_no_server_can_begin_the_rollout_fails_at_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def refuse(*_: Any) -> None:
        raise InstanceError("no drafts here")

    async with Job(tmp_path) as job:
        for server in job.servers:
            monkeypatch.setattr(server.instance, "begin_run", refuse)
        with pytest.raises(InstanceError, match="could begin the rollout"):
            await job.driver.begin_rollout(1, False)


@within(30)
async def test_a_full_disk_ends_the_recording_and_not_the_rollout(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def full(*_: Any) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    async with Job(tmp_path) as job:
        await job.driver.begin_rollout(1, False)
        monkeypatch.setattr(EventLog, "__call__", full)
        monkeypatch.setattr(RunFolder, "create", full)
        monkeypatch.setattr(RunFolder, "write_manifest", full)
        monkeypatch.setattr(TrainingRun, "append", full)
        assert len(await job.rollout(1)) == 16
        numbers = await job.driver.finish_step(1, {})
        assert numbers["responses"] == 16
        await job.sync(2)
        assert len(await job.rollout(2)) == 16
    assert caplog.text.count("000001 is not recorded any more") == 1


@within(30)
async def test_chunks_are_in_proportion_to_the_longest_response(tmp_path: Path) -> None:
    async with Job(tmp_path, scheduler="divided", chunk_tokens=None, response_tokens=1024) as job:
        await job.driver.begin_rollout(1, False)
        made = await job.generate("a", sampling=Sampling(max_tokens=1024, ignore_eos=True))
        assert made.num_chunks >= 8


@within(30)
async def test_a_prompt_without_room_for_a_response_is_refused(tmp_path: Path) -> None:
    async with Job(tmp_path, max_model_len=64) as job:
        await job.driver.begin_rollout(1, False)
        with pytest.raises(ConfigError, match="max_model_len=64"):
            await job.generate("a", prompt=tuple(range(1, 65)))
        assert len((await job.generate("b", prompt=tuple(range(1, 61)))).token_ids) == 4, "capped as verl caps it"


def _groups(job: Job) -> list[int]:
    """Of each request that was queued, in order."""
    record = job.driver._record
    assert record is not None
    assert record._log is not None
    return [event.group for event in record._log._pending if isinstance(event, Queued)]
