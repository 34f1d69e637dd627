# SPDX-License-Identifier: Apache-2.0
"""The glossary points at code that is there, and names each word once."""

import importlib
import re
from pathlib import Path

GLOSSARY = Path(__file__).parents[2] / "docs" / "concepts" / "glossary.md"


def rows() -> list[tuple[str, str]]:
    cells = [line.split("|") for line in GLOSSARY.read_text().splitlines() if line.startswith("| ")]
    return [(row[1].strip(), row[3].strip()) for row in cells if row[1].strip() != "word"]


def find(name: str) -> object:
    parts = name.split(".")
    for length in range(len(parts), 0, -1):
        try:
            found: object = importlib.import_module(".".join(parts[:length]))
        except ModuleNotFoundError:
            continue
        for part in parts[length:]:
            found = getattr(found, part)
        return found
    raise ModuleNotFoundError(name)


def test_every_word_is_named_once() -> None:
    words = [word for word, _ in rows()]
    assert sorted(words) == sorted(set(words))


def test_every_word_says_where_it_is_in_the_code() -> None:
    for word, code in rows():
        assert re.fullmatch(r"`seer\.[\w.]+`", code), word
        find(code.strip("`"))
