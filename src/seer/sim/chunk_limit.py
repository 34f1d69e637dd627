# SPDX-License-Identifier: Apache-2.0
"""How many chunks a replay simulates: a few lines of a file that others wrote can ask for years of them."""

from __future__ import annotations

from collections.abc import Iterable

from seer.errors import InputError

MAX_CHUNKS = 2_000_000
"""A million take about half a minute under each scheduler. The paper's largest workload has 40,000."""


def refuse_endless(lengths: Iterable[int], chunk_tokens: int, num_recorded: int = 0) -> None:
    """Refuse responses of more chunks than the limit, unless the recording itself has as many."""
    num_chunks = sum(-(-length // chunk_tokens) for length in lengths)
    most = max(MAX_CHUNKS, num_recorded)
    if num_chunks > most:
        raise InputError(
            f"its responses are {num_chunks:,} chunks of {chunk_tokens:,} tokens; a replay simulates up to {most:,}",
            hint="record a run with larger chunks",
        )
