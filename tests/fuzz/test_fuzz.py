# SPDX-License-Identifier: Apache-2.0
"""Fuzzing of every reader of bytes from others: the corpus, and the corpus with damage that hypothesis finds worst.

SEER_FUZZ_EXAMPLES sets the inputs per target; `make fuzz` runs many, CI a bounded number. An input that crashed a
reader is kept in the corpus under a name that begins with `crash`.
"""

from __future__ import annotations

import os
from collections import Counter
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from fuzz_targets import TARGETS

CORPUS = Path(__file__).parent / "corpus"
EXAMPLES = int(os.environ.get("SEER_FUZZ_EXAMPLES", "120"))
IS_CAMPAIGN = "SEER_FUZZ_EXAMPLES" in os.environ
executions: Counter[str] = Counter()

WORDS = (b"-1", b"1e400", b"NaN", b"null", b"[" * 2000, b"{", b'"', b"9" * 400, b'"\\ud800"', b"\n")
NUMBERS = (
    b"\x00",
    b"\xff" * 4,
    b"\xff" * 8,
    b"\x7f" + b"\xff" * 7,
    b"\x80" + bytes(7),
    b"\x01" + bytes(7),
    b"\xed\xa0\x80",
)
EXTREMES = st.sampled_from([*WORDS, *NUMBERS])
PAYLOADS = st.one_of(EXTREMES, st.binary(max_size=12))
EDITS = st.lists(
    st.tuples(st.sampled_from(["put", "insert", "cut", "double", "end"]), st.floats(0, 1), PAYLOADS), max_size=5
)


def seeds(name: str) -> list[bytes]:
    return [path.read_bytes() for path in sorted((CORPUS / name).iterdir())]


def damaged(seed: bytes, edits: list[tuple[str, float, bytes]]) -> bytes:
    """The seed after some edits, each at a share of its length."""
    content = seed
    for kind, share, payload in edits:
        at = int(share * len(content))
        rest = {
            "put": payload + content[at + len(payload) :],
            "insert": payload + content[at:],
            "cut": content[at + len(payload) :],
            "double": content[at : at + 64] + content[at:],
            "end": b"",
        }
        content = content[:at] + rest[kind]
    return content


@pytest.mark.parametrize("name", TARGETS)
def test_what_is_in_the_corpus_is_read_or_refused(name: str, tmp_path: Path) -> None:
    assert seeds(name), "a fuzzer begins with something"
    for content in seeds(name):
        TARGETS[name](content, tmp_path)


@pytest.mark.parametrize("name", TARGETS)
def test_damaged_bytes_are_read_or_refused(name: str, tmp_path: Path) -> None:
    found = seeds(name)

    @settings(
        max_examples=EXAMPLES,
        derandomize=not IS_CAMPAIGN,
        database=None,
        suppress_health_check=list(HealthCheck),
    )
    @given(st.one_of(st.builds(damaged, st.sampled_from(found), EDITS), st.binary(max_size=200)))
    def feed(content: bytes) -> None:
        executions[name] += 1
        TARGETS[name](content, tmp_path)

    feed()
    print(f"{name}: {executions[name]:,} executions, {executions.total():,} in all")
