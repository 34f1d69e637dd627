# SPDX-License-Identifier: Apache-2.0
"""One small run with turns, event by event, for each way to treat the KV of requests that wait for their tools.

To accept a change: `SEER_UPDATE_GOLDEN=1 pytest tests/golden`, then read the diff before committing it.
"""

import os
from dataclasses import replace
from pathlib import Path

import pytest

from builders import a_workload
from event_lines import line
from seer.metrics.events import Event
from seer.sim.cluster import simulate
from seer.sim.turns import WAYS, RequestTurns, WhileWaiting

FOLDER = Path(__file__).parent
TURNS = (
    RequestTurns((10, 30), (20,), (2.0, 1.0)),
    RequestTurns((40, 90, 150), (30, 60), (8.0, 1.0, 1.0)),
    RequestTurns((60,), (), (0.5,)),
    RequestTurns((20, 120), (64,), (1.0, 1.0)),
    RequestTurns((100,), (), (3.0,)),
)
WORKLOAD = replace(a_workload([[30, 150, 60], [120, 100]], instances=2, kv_tokens=320, chunk_tokens=64), turns=TURNS)


@pytest.mark.parametrize("way", WAYS)
def test_the_run_with_turns_is_as_it_was(way: WhileWaiting) -> None:
    path = FOLDER / f"turns-{way}.txt"
    events: list[Event] = []
    simulate(WORKLOAD, "seer", speculation="off", while_waiting=way, events=events.append)
    text = "\n".join(map(line, events)) + "\n"
    if os.environ.get("SEER_UPDATE_GOLDEN"):
        path.write_text(text)
    assert text.splitlines() == path.read_text().splitlines()
