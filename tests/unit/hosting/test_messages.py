# SPDX-License-Identifier: Apache-2.0
"""Commands between driver and instance: typed on the wire, carried out by the method they name."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import msgspec
import pytest

from seer.engine.base import Weights
from seer.engine.fake import FakeInstance
from seer.errors import InstanceError
from seer.hosting.messages import BeginRun, Call, Command, Down, Pause, Resume, UpdateWeights
from seer.hosting.serving import carry_out
from seer.types import DraftMode

COMMANDS: list[Command] = [
    UpdateWeights("/weights", 3),
    BeginRun("run", "grouped", 3, {0: [[1, 2], [3]]}),
    BeginRun("run", "none", 0),
    Pause(),
    Resume(),
]


class Recording(FakeInstance):
    """Notes which of its methods were awaited."""

    def __init__(self) -> None:
        super().__init__(0)
        self.calls: list[tuple[Any, ...]] = []

    async def update_weights(self, weights: Weights, weights_version: int) -> None:
        self.calls.append(("update_weights", weights, weights_version))

    async def begin_run(
        self, run: str, drafts: DraftMode, weights_version: int, past: Mapping[int, Sequence[Sequence[int]]]
    ) -> None:
        self.calls.append(("begin_run", run, drafts, weights_version, past))

    def end_group(self, group: int) -> None:
        self.calls.append(("end_group", group))

    async def pause(self) -> None:
        self.calls.append(("pause",))

    async def resume(self) -> None:
        self.calls.append(("resume",))


@pytest.mark.parametrize("command", COMMANDS, ids=repr)
def test_a_command_arrives_as_it_was_sent(command: Command) -> None:
    call = Call(7, command)
    assert msgspec.msgpack.decode(msgspec.msgpack.encode(call), type=Down) == call


@pytest.mark.parametrize(
    "command",
    [UpdateWeights("/weights", "three"), BeginRun("run", "all", 0), BeginRun("run", "none", 0, {0: ["text"]})],  # type: ignore[arg-type, list-item]
    ids=repr,
)
def test_a_field_of_another_type_is_refused_where_it_is_received(command: Command) -> None:
    with pytest.raises(msgspec.ValidationError):
        msgspec.msgpack.decode(msgspec.msgpack.encode(Call(0, command)), type=Down)


def test_each_command_calls_the_method_it_names() -> None:
    instance = Recording()

    async def play() -> None:
        for command in COMMANDS:
            await carry_out(command, instance)

    asyncio.run(play())
    assert instance.calls == [
        ("update_weights", Path("/weights"), 3),
        ("begin_run", "run", "grouped", 3, {0: [[1, 2], [3]]}),
        ("begin_run", "run", "none", 0, {}),
        ("pause",),
        ("resume",),
    ]


def test_an_instance_that_does_not_draft_refuses_a_run_by_name() -> None:
    with pytest.raises(InstanceError, match="instance 0 is a FakeInstance, which does not draft"):
        asyncio.run(carry_out(BeginRun("run", "grouped", 0), FakeInstance(0)))
