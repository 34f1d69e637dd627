# SPDX-License-Identifier: Apache-2.0
"""One small run, event by event, as text: any change of behaviour shows as a readable difference.

To accept a change: `SEER_UPDATE_GOLDEN=1 pytest tests/golden`, then read the diff before committing it.
"""

import os
from pathlib import Path

import pytest

from builders import a_workload, roll_out
from event_lines import line
from seer.scheduling.registry import NAMES

FOLDER = Path(__file__).parent
WORKLOAD = a_workload([[30, 190, 60], [200, 150], [145]], instances=2, kv_tokens=256, chunk_tokens=64)


@pytest.mark.parametrize("scheduler", [*NAMES, "verl+sd"])
def test_the_run_is_as_it_was(scheduler: str) -> None:
    path = FOLDER / f"{scheduler}.txt"
    text = "\n".join(map(line, roll_out(WORKLOAD, scheduler).events)) + "\n"
    if os.environ.get("SEER_UPDATE_GOLDEN"):
        path.write_text(text)
    assert text.splitlines() == path.read_text().splitlines()
