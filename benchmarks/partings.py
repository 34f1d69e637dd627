# SPDX-License-Identifier: Apache-2.0
"""Where the responses of two runs with the same seeds part; vllm/near_ties.py reads what is found here."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from seer.types import Response

Responses = dict[tuple[int, int], Response]
MAX_AGREED = 200
"""Places of equal responses that are kept, for comparison."""
MAX_PARTINGS = 400


def compare(plain: Responses, ours: Responses, prompts: Mapping[int, Sequence[int]]) -> dict[str, Any]:
    """How many responses are equal, what was said where the others part, and one place of each equal one."""
    partings, agreed = [], []
    for key, theirs in plain.items():
        mine = ours[key]
        at = next((i for i, (a, b) in enumerate(zip(theirs.token_ids, mine.token_ids, strict=False)) if a != b), None)
        place = len(theirs.token_ids) // 2 if at is None else at
        known = {
            "request": key,
            "at": place,
            "seed": theirs.seed,
            "context": [*prompts[key[0]], *theirs.token_ids[:place]],
            "tokens": [one.token_ids[place] for one in (theirs, mine)],
            "logprobs": [one.logprobs[place] for one in (theirs, mine)],
        }
        (agreed if at is None else partings).append(known)
    num_tokens = sum(len(one.token_ids) for one in plain.values())
    return {
        "num_responses": len(plain),
        "num_equal": sum(one.token_ids == ours[key].token_ids for key, one in plain.items()),
        "num_tokens": num_tokens,
        "num_partings": len(partings),
        "partings": partings[:MAX_PARTINGS],
        "agreed": agreed[:MAX_AGREED],
    }
