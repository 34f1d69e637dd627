# SPDX-License-Identifier: Apache-2.0
"""Token streams to measure on: long responses made of pieces of recorded ones.

A group has 16 members. Each is a chain of 500-token pieces drawn from the recorded responses, so members repeat each
other as siblings do, at any length.
"""

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from seer.drafting.recording import RecordedGroup

MEMBERS = 16
PIECE = 500


def stitched(groups: Sequence[RecordedGroup], tokens: int, seed: int) -> list[NDArray[np.int32]]:
    """Return 16 members of tokens/16 each."""
    rng = np.random.default_rng(seed)
    responses = [response for group in groups for response in group.responses if len(response) > PIECE]
    per_member = tokens // MEMBERS
    members = []
    for _ in range(MEMBERS):
        pieces = []
        for _ in range(per_member // PIECE + 1):
            response = responses[rng.integers(len(responses))]
            start = rng.integers(len(response) - PIECE)
            pieces.append(response[start : start + PIECE])
        members.append(np.ascontiguousarray(np.concatenate(pieces)[:per_member]))
    return members


def edited(groups: Sequence[RecordedGroup], tokens: int, seed: int) -> list[NDArray[np.int32]]:
    """Return 16 members that are one text with 2% of the tokens replaced, each in its own places."""
    rng = np.random.default_rng(seed)
    text = np.concatenate([response for group in groups for response in group.responses])
    per_member = tokens // MEMBERS
    text = np.resize(text, per_member)
    members = []
    for _ in range(MEMBERS):
        copy = text.copy()
        places = rng.random(per_member) < 0.02
        copy[places] = rng.integers(0, 150_000, int(places.sum()))
        members.append(copy)
    return members


class Interleaved(NamedTuple):
    """Members growing side by side in small chunks, as one batch call."""

    groups: NDArray[np.uint64]
    requests: NDArray[np.uint64]
    previous_counts: NDArray[np.int64]
    tokens: NDArray[np.int32]
    offsets: NDArray[np.int64]


def interleave(members: Sequence[NDArray[np.int32]], chunk: int = 16) -> Interleaved:
    rounds = len(members[0]) // chunk
    flat = np.stack([member[: rounds * chunk].reshape(rounds, chunk) for member in members], axis=1).reshape(-1)
    items = rounds * len(members)
    return Interleaved(
        np.zeros(items, np.uint64),
        np.tile(np.arange(len(members), dtype=np.uint64), rounds),
        np.repeat(np.arange(rounds) * chunk, len(members)).astype(np.int64),
        np.ascontiguousarray(flat),
        np.arange(items + 1, dtype=np.int64) * chunk,
    )
