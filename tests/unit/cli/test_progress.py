# SPDX-License-Identifier: Apache-2.0
"""The progress of a rollout on a terminal, and its silence elsewhere."""

from __future__ import annotations

import asyncio
import io
import sys
from types import SimpleNamespace
from typing import Any

import pytest
from rich.console import Console

from seer.cli.progress import Progress
from seer.hosting.health import Health
from seer.metrics.events import InstanceState


def a_rollout(num_groups_done: int = 1, ailing: tuple[Health, ...] = ()) -> Any:
    """One of two groups done: 12 tokens of 2 responses, and some 3 tokens to come."""
    requests = [
        SimpleNamespace(group=0, num_generated=8, ended=True),
        SimpleNamespace(group=1, num_generated=4, ended=False),
    ]
    buffer = SimpleNamespace(requests=lambda: requests, num_ended=1, num_admitted=2)
    loop = SimpleNamespace(buffer=buffer, context=SimpleNamespace(expected_tokens=lambda group: 7))
    instance = SimpleNamespace(
        view=lambda: SimpleNamespace(num_running=1, used_kv_blocks=25), limits=SimpleNamespace(kv_blocks=100)
    )
    current = SimpleNamespace(loop=loop, num_groups_done=num_groups_done, num_groups_wanted=2)
    healths = [Health.HEALTHY, Health.RETIRED, *ailing]
    statuses = [SimpleNamespace(id=id, health=health) for id, health in enumerate(healths)]
    return SimpleNamespace(current=current, fleet=SimpleNamespace(instances=[instance], view=lambda: statuses))


def a_terminal() -> Console:
    return Console(file=io.StringIO(), force_terminal=True, width=70, color_system=None)


def shown(rollout: Any, console: Console, **settings: Any) -> str:
    async def scenario() -> None:
        progress = Progress(rollout, console=console, **settings)
        before = sys.stdout
        progress.start()
        await asyncio.sleep(0)
        assert sys.stdout is before, "results must not be taken for progress"
        await progress.stop()

    asyncio.run(scenario())
    assert isinstance(console.file, io.StringIO)
    return console.file.getvalue()


def test_a_terminal_shows_the_state_of_the_run() -> None:
    text = shown(a_rollout(), a_terminal(), label="train")
    for part in ("train", "1/2", "groups", "1/2 responses", "12 tokens", "1 running", "KV 25%", "1.00", "left"):
        assert part in text


def test_instances_that_are_not_healthy_are_named() -> None:
    assert "instance" not in Progress(a_rollout(), console=a_terminal()).line()
    some = Progress(a_rollout(ailing=(Health.SUSPECT, Health.STALE)), console=a_terminal()).line()
    assert some.endswith("; instance 2 suspect, instance 3 stale")
    many = Progress(a_rollout(ailing=(Health.DEAD,) * 9), console=a_terminal()).line()
    assert many.endswith("instance 5 dead and 5 more")


def test_before_the_run_it_says_that_it_starts() -> None:
    rollout = a_rollout()
    rollout.current = None
    assert "starting" in shown(rollout, a_terminal())


def test_accepted_tokens_are_those_of_the_instances_that_run() -> None:
    progress = Progress(a_rollout(), console=a_terminal())
    for instance, num_running, accepted in ((0, 2, 3.0), (1, 1, 2.0), (2, 0, 9.0)):
        progress.on_event(InstanceState(0.0, instance, num_running, 0, 0, accepted_per_step=accepted))
    assert "2.50 tokens/step" in progress.line()


@pytest.mark.parametrize(("is_terminal", "quiet"), [(False, False), (True, True)])
def test_a_file_and_a_quiet_terminal_get_nothing(is_terminal: bool, quiet: bool) -> None:
    console = Console(file=io.StringIO(), force_terminal=is_terminal)
    assert shown(a_rollout(), console, quiet=quiet) == ""
