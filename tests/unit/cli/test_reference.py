# SPDX-License-Identifier: Apache-2.0
"""The generated reference pages are those that the code would generate now."""

from __future__ import annotations

from pathlib import Path

import pytest

pytest.importorskip("torch", reason="some settings belong to the local engine")

from seer.cli.main import BENCHES, VERBS
from seer.cli.reference import PAGES, cli_page, config_page, field_docstrings
from seer.types import Sampling

FOLDER = Path(__file__).parents[3] / "docs" / "reference"


@pytest.mark.parametrize("name", PAGES)
def test_the_page_in_the_docs_is_up_to_date(name: str) -> None:
    assert (FOLDER / name).read_text() == PAGES[name](), "stale: run `make docs`"


def test_every_verb_and_every_bench_is_there_with_its_options() -> None:
    page = cli_page()
    for verb in VERBS:
        assert f"seer {verb.replace('_', '-')}" in page, verb
    for bench in BENCHES:
        assert f"seer bench {bench.removeprefix('bench_')}" in page, bench
    assert "| `--verify P` |" in page
    assert "| `--n N` | `8` | responses per prompt |" in page
    assert "%(" not in page  # argparse's own notation for defaults


def test_the_strings_under_fields_are_their_meanings() -> None:
    assert field_docstrings(Sampling)["temperature"] == "0 is greedy."
    assert "| `max_tokens: int` | required | The most tokens a response may have" in config_page()
