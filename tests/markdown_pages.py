# SPDX-License-Identifier: Apache-2.0
"""The repository's Markdown pages as their reader meets them: code blocks, headings and links, by a real parser."""

from __future__ import annotations

import re
import subprocess
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path

from markdown_it import MarkdownIt
from markdown_it.token import Token

ROOT = Path(__file__).parents[1]
DOCS = sorted([*ROOT.glob("*.md"), *(ROOT / "docs").rglob("*.md")])
"""What users read: the pages at the top and the docs."""

_PARSER = MarkdownIt("commonmark").enable("table")


@dataclass(frozen=True, slots=True)
class Block:
    """One code block."""

    page: Path
    line: int
    language: str
    """Empty for an indented block and for a fence without one."""
    text: str

    @property
    def where(self) -> str:
        """For the reader of a failure."""
        return f"{self.page.relative_to(ROOT)}:{self.line}"


def tracked_pages() -> list[Path]:
    """Every Markdown file of the repository, those of benchmarks and examples included."""
    listed = subprocess.run(
        ["git", "ls-files", "--cached", "--others", "--exclude-standard", "*.md"],
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=False,
    )
    found = {ROOT / name for name in listed.stdout.split("\n") if name}  # empty where this is no git checkout
    return sorted({page for page in found if page.exists()} | set(DOCS))


def code_blocks(page: Path) -> Iterator[Block]:
    """Fenced and indented."""
    for token in _PARSER.parse(page.read_text()):
        if token.type in ("fence", "code_block"):
            assert token.map is not None, "a block knows its lines"
            yield Block(page, token.map[0] + 1, token.info.strip(), token.content)


def links(page: Path) -> list[str]:
    """Targets of links and images, as they are written."""
    return [
        str(child.attrs.get("href") or child.attrs["src"])
        for token in _PARSER.parse(page.read_text())
        for child in token.children or ()
        if child.type in ("link_open", "image")
    ]


def inline_code(page: Path) -> list[str]:
    """What stands between backticks."""
    return [
        child.content
        for token in _PARSER.parse(page.read_text())
        for child in token.children or ()
        if child.type == "code_inline"
    ]


def anchors(page: Path) -> set[str]:
    """What a link may name after its #: GitHub's slugs of the headings, which the site has too."""
    tokens = _PARSER.parse(page.read_text())
    found: set[str] = set()
    num_seen: Counter[str] = Counter()
    for opening, heading in pairwise(tokens):
        if opening.type == "heading_open":
            slug = _slug(heading)
            found.add(f"{slug}-{num_seen[slug]}" if num_seen[slug] else slug)
            num_seen[slug] += 1
    return found


def _slug(heading: Token) -> str:
    text = "".join(child.content for child in heading.children or () if child.type in ("text", "code_inline"))
    return re.sub(r"[^\w\- ]", "", text.lower()).replace(" ", "-")
