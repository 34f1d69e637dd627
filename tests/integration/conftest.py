# SPDX-License-Identifier: Apache-2.0
"""Fixtures of the integration tests."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

import pytest

if TYPE_CHECKING:
    from recorded_runs import RecordedRun


@pytest.fixture(scope="session")
def recorded_run(tmp_path_factory: pytest.TempPathFactory) -> RecordedRun:
    """A finished run; tests edit copies of it."""
    pytest.importorskip("torch")
    from recorded_runs import make_run

    return make_run(tmp_path_factory.mktemp("recorded"))


@pytest.fixture
def run_copy(recorded_run: RecordedRun, tmp_path: Path) -> RecordedRun:
    """A copy of the finished run, for a test to damage."""
    return recorded_run.copied_to(tmp_path / "copy")
