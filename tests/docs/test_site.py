# SPDX-License-Identifier: Apache-2.0
"""The docs site builds without a warning, and its reference has every public name."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

import seer
from markdown_pages import ROOT

pytest.importorskip("material", reason="needs `pip install 'seer-rollout[docs]'`")
pytest.importorskip("mkdocstrings", reason="needs `pip install 'seer-rollout[docs]'`")


def test_the_site_builds_without_a_warning_and_shows_every_public_name(tmp_path: Path) -> None:
    built = subprocess.run(
        [sys.executable, "-m", "mkdocs", "build", "--strict", "--site-dir", str(tmp_path / "site")],
        cwd=ROOT,
        env=os.environ | {"NO_MKDOCS_2_WARNING": "1"},
        capture_output=True,
        text=True,
        check=False,
    )
    assert built.returncode == 0, built.stderr
    assert "WARNING" not in built.stderr
    page = (tmp_path / "site" / "reference" / "names" / "index.html").read_text()
    assert [name for name in seer.__all__ if f'id="seer.{name}"' not in page] == []
    home = (tmp_path / "site" / "index.html").read_text()
    assert 'href="tutorial/"' in home  # README's docs/tutorial.md
    assert 'href="https://github.com/seer-rollout/seer/blob/main/benchmarks/engine/results.md"' in home
