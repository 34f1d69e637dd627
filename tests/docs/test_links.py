# SPDX-License-Identifier: Apache-2.0
"""Links between the pages lead somewhere; whether other sites still exist is not looked up."""

from __future__ import annotations

from pathlib import Path
from urllib.parse import unquote, urlsplit

import pytest

from markdown_pages import ROOT, anchors, links, tracked_pages


def broken(page: Path, root: Path = ROOT) -> list[str]:
    """Relative links of `page` whose file or heading is not there, or that leave `root`."""
    found = []
    for link in links(page):
        parts = urlsplit(link)
        if parts.scheme or parts.netloc:
            continue
        target = page if not parts.path else (page.parent / unquote(parts.path)).resolve()
        is_there = target.exists() and target.is_relative_to(root)
        if not is_there or (parts.fragment and parts.fragment not in anchors(target)):
            found.append(link)
    return found


@pytest.mark.parametrize("page", tracked_pages(), ids=lambda page: str(page.relative_to(ROOT)))
def test_every_relative_link_and_its_anchor_is_there(page: Path) -> None:
    assert broken(page) == []


def test_a_missing_file_and_a_missing_heading_are_found(tmp_path: Path) -> None:
    page = tmp_path / "page.md"
    page.write_text(
        "# One `two`, three\n\n[a](#one-two-three) [b](#one) [c](https://example.org/x) [d](nowhere.md) [e](../)\n"
    )
    assert broken(page, tmp_path) == ["#one", "nowhere.md", "../"]


def test_headings_of_one_name_are_numbered(tmp_path: Path) -> None:
    page = tmp_path / "page.md"
    page.write_text("# Added\n\n## Added\n\n## Added `x`\n\n# Added\n")
    assert anchors(page) == {"added", "added-1", "added-x", "added-2"}
