# SPDX-License-Identifier: Apache-2.0
"""An instance in a child process that dies, hangs, refuses or restarts."""

from __future__ import annotations

import asyncio
import math
import os
import signal
from collections.abc import Callable, Coroutine
from pathlib import Path
from typing import Any

import pytest

from seer.config import HostingConfig
from seer.engine.prepare import InstanceSpec
from seer.errors import ConfigError, DeadlineExceeded, InstanceError, NoProbability, SeerError
from seer.hosting import ProcessInstance
from seer.hosting.health import Health
from seer.hosting.launcher import Child, LocalLauncher
from seer.hosting.messages import BeginRun, Command, UpdateWeights
from seer.hosting.starvation import Starvation
from seer.types import Chunk, ChunkEnd, ChunkOutput, Sampling

DEADLINE_S = 60.0
PATIENT = HostingConfig(pin_cores=False, heartbeat_s=0.1, silence_deadline_s=600.0, progress_deadline_s=600.0)
"""Deadlines that no test lives to see: what it waits for must come by itself."""
QUICK = HostingConfig(pin_cores=False, heartbeat_s=0.1, silence_deadline_s=1.0, progress_deadline_s=1.0)


def a_chunk(request: int = 0, *, attempt: int = 1, max_tokens: int = 50, weights_version: int = 0) -> Chunk:
    return Chunk(
        request=request,
        group=0,
        attempt=attempt,
        num_prompt_tokens=2,
        num_generated_tokens=0,
        max_tokens=max_tokens,
        sampling=Sampling(max_tokens=5000, ignore_eos=True),
        seed=7,
        weights_version=weights_version,
        prompt=[1, 2],
    )


class Watched:
    """A hosted instance whose outputs and losses can be awaited."""

    def __init__(self, factory: str, options: HostingConfig = QUICK, **settings: Any) -> None:
        self.outputs: list[ChunkOutput] = []
        self.losses: list[str] = []
        self.fatal: list[SeerError] = []
        self.news = asyncio.Event()
        spec = InstanceSpec(factory=factory, settings=settings)
        self.instance = ProcessInstance(0, spec, options=options, on_lost=self._lost, on_fatal=self._fail)

    def take(self, output: ChunkOutput) -> None:
        self.outputs.append(output)
        self.news.set()

    def _lost(self, instance: int, reason: str) -> None:
        self.losses.append(reason)
        self.news.set()

    def _fail(self, error: SeerError) -> None:
        self.fatal.append(error)
        self.news.set()

    async def failure(self) -> SeerError:
        async with asyncio.timeout(DEADLINE_S):
            while not self.fatal:
                self.news.clear()
                await self.news.wait()
        return self.fatal[0]

    async def loss(self) -> str:
        async with asyncio.timeout(DEADLINE_S):
            while not self.losses:
                self.news.clear()
                await self.news.wait()
        return self.losses[0]

    async def tokens(self, num: int) -> None:
        async with asyncio.timeout(DEADLINE_S):
            while sum(output.num_tokens for output in self.outputs) < num:
                self.news.clear()
                await self.news.wait()


def play(scenario: Coroutine[Any, Any, None]) -> None:
    asyncio.run(scenario)


def is_alive(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    return True


def test_a_killed_process_is_noticed_and_its_chunks_end_after_their_tokens() -> None:
    async def scenario() -> None:
        watched = Watched("host_fakes:make_fake", step_s=0.001)
        await watched.instance.start(watched.take)
        watched.instance.submit(a_chunk(max_tokens=5000))
        await watched.tokens(10)
        assert watched.instance.pid is not None
        os.kill(watched.instance.pid, signal.SIGKILL)
        assert "SIGKILL" in await watched.loss()
        assert [o.end for o in watched.outputs if o.end] == [ChunkEnd.FAILED]
        assert not watched.instance.is_up
        with pytest.raises(InstanceError, match="down"):
            watched.instance.submit(a_chunk(1))
        await watched.instance.close()

    play(scenario())


def test_a_crash_is_reported_with_the_end_of_its_log() -> None:
    async def scenario() -> None:
        watched = Watched("host_fakes:make_crashing")
        await watched.instance.start(watched.take)
        watched.instance.submit(a_chunk())
        reason = await watched.loss()
        assert "exit status 3" in reason
        assert "instance 0 is about to exit" in reason
        await watched.instance.close()

    play(scenario())


def test_a_process_that_falls_silent_is_killed() -> None:
    async def scenario() -> None:
        watched = Watched("host_fakes:make_hanging")
        await watched.instance.start(watched.take)
        pid = watched.instance.pid
        assert pid is not None
        watched.instance.submit(a_chunk())
        assert "no message" in await watched.loss()
        await watched.instance.close()
        assert not is_alive(pid)

    play(scenario())


def test_an_instance_that_sends_heartbeats_and_never_steps_is_lost() -> None:
    async def scenario() -> None:
        watched = Watched("host_fakes:make_stuck")
        await watched.instance.start(watched.take)
        watched.instance.submit(a_chunk())
        assert "no step for" in await watched.loss()
        await watched.instance.close()

    play(scenario())


def test_a_restarted_instance_has_the_same_weights_version_and_the_same_tokens() -> None:
    async def scenario() -> None:
        watched = Watched("host_fakes:make_fake")
        await watched.instance.start(watched.take)
        await watched.instance.update_weights(Path("anywhere"), 3)
        watched.instance.submit(a_chunk(weights_version=3))
        await watched.tokens(50)
        assert watched.instance.pid is not None
        os.kill(watched.instance.pid, signal.SIGKILL)
        await watched.loss()
        await watched.instance.restart()
        watched.instance.submit(a_chunk(weights_version=3, attempt=2))
        await watched.tokens(100)
        await watched.instance.close()
        first, second = (
            [t for o in watched.outputs if o.span and o.attempt == attempt for t in o.span.ids] for attempt in (1, 2)
        )
        assert first == second

    play(scenario())


def test_an_error_of_the_factory_is_raised_in_the_driver_with_its_own_class() -> None:
    async def scenario() -> None:
        watched = Watched("host_fakes:make_refusing")
        with pytest.raises(ConfigError, match="no such model") as caught:
            await watched.instance.start(watched.take)
        assert caught.value.hint == "name another"
        assert watched.instance.pid is None

    play(scenario())


async def refused_start(watched: Watched, kind: type[SeerError], match: str) -> SeerError:
    """The error with which an instance does not start; it leaves no process."""
    with pytest.raises(kind, match=match) as caught:
        await watched.instance.start(watched.take)
    assert watched.instance.pid is None
    return caught.value


def test_an_error_of_a_library_at_the_start_comes_with_the_end_of_the_log() -> None:
    async def scenario() -> None:
        error = await refused_start(Watched("host_fakes:make_failing"), InstanceError, "RuntimeError: see above")
        assert "the device is full" in str(error)
        assert "log_dir" in (error.hint or "")

    play(scenario())


def test_a_start_that_takes_too_long_has_a_name() -> None:
    async def scenario() -> None:
        options = HostingConfig(pin_cores=False, start_deadline_s=0.001)
        watched = Watched("host_fakes:make_fake", options)
        with pytest.raises(DeadlineExceeded, match="the start of instance 0"):
            await watched.instance.start(watched.take)

    play(scenario())


def test_a_start_that_takes_too_long_comes_with_the_end_of_the_log() -> None:
    class Told(LocalLauncher):
        """Looks for the cause once the process has said what it does."""

        async def launch(self, *arguments: Any) -> Child:
            child = await super().launch(*arguments)
            usual = child.exit_cause

            async def exit_cause() -> str:
                while "compiling kernels" not in (cause := await usual()):  # noqa: ASYNC110 - a log tells nobody
                    await asyncio.sleep(QUICK.heartbeat_s)
                return cause

            child.exit_cause = exit_cause  # type: ignore[method-assign]
            return child

    async def scenario() -> None:
        watched = Watched("host_fakes:make_slow_to_start", HostingConfig(pin_cores=False, start_deadline_s=0.001))
        watched.instance._launcher = Told()
        error = await refused_start(watched, DeadlineExceeded, "the start of instance 0 took longer")
        assert "it is still running; the end of its log:\ncompiling kernels" in str(error)
        assert "start_deadline_s" in (error.hint or "")

    play(scenario())


def test_closing_leaves_no_process() -> None:
    async def scenario() -> None:
        watched = Watched("host_fakes:make_fake")
        await watched.instance.start(watched.take)
        pid = watched.instance.pid
        assert pid is not None
        await watched.instance.close()
        await watched.instance.close()
        assert not is_alive(pid)

    play(scenario())


def test_silence_of_a_process_that_gets_no_core_does_not_count(monkeypatch: pytest.MonkeyPatch) -> None:
    """The process hangs. For as many looks as its deadline has, the kernel says that it waited for a core."""
    num_looks = 3 * round((QUICK.silence_deadline_s or 0.0) / QUICK.heartbeat_s)
    looks = iter(range(10**6))
    starved_looks: list[int] = []

    def growth_s(self: Starvation) -> float:
        look = next(looks)
        starved_looks.append(look)
        return 2 * QUICK.heartbeat_s if look < num_looks else 0.0

    monkeypatch.setattr(Starvation, "growth_s", growth_s)

    async def scenario() -> None:
        watched = Watched("host_fakes:make_hanging")
        await watched.instance.start(watched.take)
        watched.instance.submit(a_chunk())
        assert "no message" in await watched.loss()
        await watched.instance.close()

    play(scenario())
    assert len(starved_looks) > num_looks, "it was taken for one that hangs while it had no core"


def test_waits_for_a_core_are_those_of_the_kernel(tmp_path: Path) -> None:
    def wait(thread: str, waited_s: float, children: str = "") -> None:
        pid = thread.partition(".")[0]
        folder = tmp_path / pid / "task" / thread
        folder.mkdir(parents=True, exist_ok=True)
        (folder / "schedstat").write_text(f"5000 {int(waited_s * 1e9)} 17\n")
        (folder / "children").write_text(children)

    starvation = Starvation(1, tmp_path)
    assert starvation.growth_s() == 0.0, "there is no such process"
    wait("1", 3.0, "2 ")
    wait("2", 8.0)
    assert starvation.growth_s() == 0.0, "what was before the first look"
    wait("1", 3.5, "2 ")
    wait("2", 10.0)
    assert starvation.growth_s() == 2.0, "of a child, longer than that of its parent"
    assert starvation.growth_s() == 0.0
    assert Starvation(os.getpid()).growth_s() == 0.0


def test_heartbeats_must_be_more_frequent_than_the_silence_deadline() -> None:
    with pytest.raises(ConfigError, match="silence_deadline_s"):
        HostingConfig(heartbeat_s=1.0, silence_deadline_s=2.0)


def test_a_restart_repeats_the_newest_command_of_each_kind_also_one_that_came_while_it_was_down(tmp_path: Path) -> None:
    async def scenario() -> None:
        watched = Watched("host_fakes:make_noting", notes=str(tmp_path / "notes"))
        instance = watched.instance
        await instance.start(watched.take)
        for version in (1, 2):
            await instance.configure(UpdateWeights("/weights", version))
            await instance.configure(BeginRun(f"run-{version}", "grouped", version))
        assert instance.pid is not None
        os.kill(instance.pid, signal.SIGKILL)
        await watched.loss()
        instance.configure_after_restart(BeginRun("run-3", "grouped", 2, {4: [[5]]}))
        (tmp_path / "notes").unlink()
        await instance.restart()
        await instance.close()

    play(scenario())
    assert (tmp_path / "notes").read_text().splitlines() == ["update_weights /weights 2", "begin_run run-3 {4: [[5]]}"]


class Looking(LocalLauncher):
    """Tells of every launch, and of every command on its way to the process, which it may keep from it."""

    def __init__(self, look: Callable[[Command | None], None]) -> None:
        self._look = look

    async def launch(self, *arguments: Any) -> Child:
        self._look(None)
        child = await super().launch(*arguments)

        async def localized(command: Command) -> Command:
            self._look(command)
            return command

        child.localized = localized  # type: ignore[method-assign]
        return child


async def restart_with(watched: Watched, look: Callable[[Command | None], None], newest: Command) -> None:
    """Start an instance, lose it, and start it again when it has missed a command."""
    instance = watched.instance
    await instance.start(watched.take)
    await instance.configure(UpdateWeights("/weights", 1))
    os.kill(instance.pid or 0, signal.SIGKILL)
    await watched.loss()
    instance.configure_after_restart(newest)
    instance._launcher = Looking(look)
    await instance.restart()


def test_an_instance_that_was_restarted_is_stale_until_it_has_the_newest_weights(tmp_path: Path) -> None:
    seen: list[tuple[Health, bool, int]] = []

    async def scenario() -> None:
        watched = Watched("host_fakes:make_fake", PATIENT)

        def look(command: Command | None) -> None:
            status = watched.instance.status()
            seen.append((status.health, watched.instance.is_up, status.weights_version))

        await restart_with(watched, look, UpdateWeights("/weights", 2))
        look(None)
        await watched.instance.close()

    play(scenario())
    assert [health for health, _, _ in seen] == [Health.RESTARTING, Health.STALE, Health.HEALTHY]
    assert [is_up for _, is_up, _ in seen] == [False, False, True]
    assert [version for _, _, version in seen[1:]] == [0, 2]


def test_a_command_that_a_newer_one_overtakes_during_a_restart_does_not_fail_it(tmp_path: Path) -> None:
    """As weights that are on their way to a node when newer ones are asked for there."""

    async def scenario() -> None:
        watched = Watched("host_fakes:make_noting", PATIENT, notes=str(tmp_path / "notes"))

        def look(command: Command | None) -> None:
            if isinstance(command, UpdateWeights) and command.weights_version == 2:
                watched.instance.configure_after_restart(UpdateWeights("/weights", 3))
                raise InstanceError("others have been asked for since")

        await restart_with(watched, look, UpdateWeights("/weights", 2))
        assert watched.instance.is_up
        await watched.instance.close()

    play(scenario())
    assert (tmp_path / "notes").read_text().splitlines() == ["update_weights /weights 1", "update_weights /weights 3"]


def test_an_instance_whose_weights_do_not_come_is_down_and_can_be_restarted_again() -> None:
    async def scenario() -> None:
        watched = Watched("host_fakes:make_fake", PATIENT)
        is_cut = True

        def look(command: Command | None) -> None:
            if is_cut and isinstance(command, UpdateWeights):
                raise InstanceError("the node does not answer")

        with pytest.raises(InstanceError, match="does not answer"):
            await restart_with(watched, look, UpdateWeights("/weights", 2))
        assert watched.instance.health is Health.DEAD
        is_cut = False
        await watched.instance.restart()
        assert (watched.instance.is_up, watched.instance.view().weights_version) == (True, 2)
        await watched.instance.close()

    play(scenario())


def test_an_instance_that_dies_with_the_last_answer_of_its_restart_was_not_restarted() -> None:
    async def scenario() -> None:
        watched = Watched("host_fakes:make_fake", PATIENT)
        instance = watched.instance
        await instance.start(watched.take)
        await instance.configure(UpdateWeights("/weights", 1))
        os.kill(instance.pid or 0, signal.SIGKILL)
        await watched.loss()
        call = instance.call

        async def call_and_die(command: Command) -> None:
            await call(command)
            instance.give_up("its process ended")

        instance.call = call_and_die  # type: ignore[method-assign]
        with pytest.raises(InstanceError, match="was lost when it had its configuration"):
            await instance.restart()
        assert not instance.is_up
        instance.call = call  # type: ignore[method-assign]
        await instance.restart()
        await instance.close()

    play(scenario())


def test_an_instance_that_is_closed_while_it_starts_leaves_no_process() -> None:
    pids: list[int] = []

    class Slow(LocalLauncher):
        async def launch(self, *arguments: Any) -> Child:
            child = await super().launch(*arguments)
            pids.append(child.pid or 0)
            launched.set()
            await may_return.wait()
            return child

    async def scenario() -> None:
        watched = Watched("host_fakes:make_fake", PATIENT)
        watched.instance._launcher = Slow()
        starting = asyncio.create_task(watched.instance.start(watched.take))
        await launched.wait()
        await watched.instance.close()
        may_return.set()
        with pytest.raises(InstanceError, match="instance 0 was closed while it started"):
            await starting
        assert watched.instance.health is Health.RETIRED

    launched, may_return = asyncio.Event(), asyncio.Event()
    play(scenario())
    assert not [pid for pid in pids if is_alive(pid)]


def test_a_call_to_an_instance_that_is_closed_fails_at_once(tmp_path: Path) -> None:
    async def scenario() -> None:
        watched = Watched("host_fakes:make_never_updating", PATIENT)
        await watched.instance.start(watched.take)
        updating = asyncio.create_task(watched.instance.update_weights(tmp_path, 1))
        while not watched.instance._calls._answers:  # noqa: ASYNC110 - a few turns of the event loop
            await asyncio.sleep(0)
        await watched.instance.close()
        with pytest.raises(InstanceError, match="instance 0 was closed"):
            await updating

    play(scenario())


def test_an_instance_hears_of_the_end_of_groups_that_it_may_draft_for_and_of_no_others(tmp_path: Path) -> None:
    async def scenario() -> None:
        watched = Watched("host_fakes:make_noting", notes=str(tmp_path / "notes"))
        instance = watched.instance
        await instance.start(watched.take)
        await instance.configure(BeginRun("run", "grouped", 0, {4: [[5]]}))
        instance.submit(a_chunk())  # of group 0
        for group in (0, 3, 4, 0):  # 4 has responses of an earlier epoch
            instance.end_group(group)
        await instance.close()

    play(scenario())
    notes = (tmp_path / "notes").read_text().splitlines()
    assert notes == ["begin_run run {4: [[5]]}", "end_group 0", "end_group 4"]


@pytest.mark.parametrize(("token", "logprob"), [(-1, -1.0), (50, -1.0), (7, math.nan), (7, -math.inf)])
def test_a_token_that_the_model_cannot_have_sampled_is_not_accepted(token: int, logprob: float) -> None:
    async def scenario() -> None:
        watched = Watched("host_fakes:make_bad_tokens", PATIENT, token=token, logprob=logprob)
        await watched.instance.start(watched.take)
        watched.instance.submit(a_chunk(3))
        error = await watched.failure()
        assert isinstance(error, NoProbability)
        assert "request 3, position 3: the model gives no probability" in str(error)
        (output,) = watched.outputs
        assert (output.num_tokens, output.end) == (0, ChunkEnd.FAILED)
        assert not watched.losses, "a restart cannot help"
        await watched.instance.close()

    play(scenario())


@pytest.mark.parametrize("num_views", [0, 1])
def test_a_message_or_a_heartbeat_that_fails_ends_its_process(num_views: int) -> None:
    """One view is sent after a chunk arrives; the next is a heartbeat's."""

    async def scenario() -> None:
        watched = Watched("host_fakes:make_no_view", PATIENT, num_views=num_views)
        await watched.instance.start(watched.take)
        watched.instance.submit(a_chunk())
        reason = await watched.loss()
        assert "exit status 1" in reason
        assert "ZeroDivisionError" in reason
        await watched.instance.close()

    play(scenario())


@pytest.mark.parametrize("reports", [True, False])
def test_a_worker_that_fails_is_lost_at_once_with_its_error(reports: bool, tmp_path: Path) -> None:
    pytest.importorskip("torch")
    from seer.engine.local.tiny import make_tiny_model

    folder = make_tiny_model(tmp_path / "tiny")

    async def scenario() -> None:
        settings = {"model_dir": str(folder), "kv_blocks": 64, "reports": reports}
        watched = Watched("host_fakes:make_dying_worker", PATIENT, **settings)
        await watched.instance.start(watched.take)
        watched.instance.submit(a_chunk())
        reason = await watched.loss()
        assert "ZeroDivisionError: on purpose" in reason
        assert ("its engine failed" in reason) is reports
        assert [output.end for output in watched.outputs] == [ChunkEnd.FAILED]
        await watched.instance.close()

    play(scenario())
