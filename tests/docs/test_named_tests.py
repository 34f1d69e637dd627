# SPDX-License-Identifier: Apache-2.0
"""Tests that the docs name as their proof exist."""

from __future__ import annotations

import re

from markdown_pages import DOCS, ROOT

NAME = re.compile(r"`(test_[a-z0-9_]+)`")


def test_every_test_that_a_page_names_is_there() -> None:
    files = list((ROOT / "tests").rglob("test_*.py"))
    defined = {name for file in files for name in re.findall(r"def (test_\w+)", file.read_text())}
    named = {name for page in DOCS for name in NAME.findall(page.read_text())}
    assert len(named) > 40
    assert sorted(named - defined - {file.stem for file in files}) == []
