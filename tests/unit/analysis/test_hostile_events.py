# SPDX-License-Identifier: Apache-2.0
"""Event logs whose numbers are extreme, each field in turn: they are reported and replayed, or refused in a line."""

from __future__ import annotations

from pathlib import Path

import msgspec
import pytest

from seer.cli.main import main
from seer.metrics.events import (
    Decoding,
    Ended,
    Event,
    Extended,
    InstanceState,
    Prefilling,
    Queued,
    Started,
    Stepped,
    Stopped,
)
from seer.metrics.jsonl import EventLog
from seer.runs.run_folder import RunFolder
from seer.types import InstanceLimits

LENGTH = 20
LIMITS = InstanceLimits(kv_blocks=100, block_size=16, max_num_seqs=4, max_model_len=1600)
INT_MAX = (1 << 63) - 1
VALUES = (0, 1, INT_MAX, 0.0, 1e-320, 1e10)


def a_run() -> list[Event]:
    """Two groups of two responses on one instance."""
    events: list[Event] = [Queued(1.0, r, r // 2, r % 2, 3) for r in range(4)]
    events += [InstanceState(1.0, 0, 4, 0, 80)]
    for r in range(4):
        events += [Started(1.0, r, 0, 10, None, False), Prefilling(1.0, r, 0, 3, 0, 0), Decoding(1.1, r, 0)]
    events += [Stepped(1.5, 0, 10, 0.4, 40, 0, 40, 0, 0), Stepped(1.6, 0, 1, 0.05, 16, 12, 4, 0, 0)]
    for r in range(4):
        events += [Extended(1.6, r, 0, 10, 10)]
    events += [Stepped(2.0, 0, 10, 0.3, 20, 0, 20, 0, 0)]
    for r in range(4):
        events += [Stopped(2.0 + r, r, 0, LENGTH, "stop"), Ended(2.0 + r, r, LENGTH, "stop")]
    return events


KINDS = {type(event) for event in a_run()}
CASES = [
    (kind, field, value)
    for kind in sorted(KINDS, key=lambda one: one.__name__)
    for field, hint in ({"t_s": "float"} | kind.__annotations__).items()
    for value in VALUES
    if str(hint) in ("int", "float", "int | None") and isinstance(value, int) == (hint != "float")
]


def write(path: Path, events: list[Event]) -> Path:
    folder = RunFolder(path / "run")
    folder.create()
    options = {"scheduler": "seer", "instances": 1, "max_tokens": LENGTH, "chunk_tokens": 16}
    limits = {name: getattr(LIMITS, name) for name in LIMITS.__dataclass_fields__}
    folder.write_manifest({"command": "rollout", "options": options, "limits": limits})
    with EventLog(folder.events, {}) as log:
        for event in events:
            log(event)
    return folder.path


@pytest.mark.parametrize("verb", ["report", "replay"])
def test_the_run_itself_is_read(tmp_path: Path, verb: str) -> None:
    assert main([verb, str(write(tmp_path, a_run()))]) == 0


@pytest.mark.parametrize(("kind", "field", "value"), CASES, ids=lambda one: getattr(one, "__name__", str(one)))
def test_an_extreme_number_is_no_bug(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], kind: type[msgspec.Struct], field: str, value: float
) -> None:
    events = [
        msgspec.structs.replace(event, **{field: value}) if isinstance(event, kind) else event for event in a_run()
    ]
    run = write(tmp_path, events)
    for verb in ("report", "replay"):
        code = main([verb, str(run)])
        said = capsys.readouterr().err
        assert (code, said.count("error: ")) in ((0, 0), (2, 1)), said
