# SPDX-License-Identifier: Apache-2.0
"""Facts of a chunk as they travel through vLLM: good ones to change, and every way in which one of them may be bad."""

from __future__ import annotations

import typing
from typing import Any

import msgspec

from bad_values import bad_values
from seer.engine.vllm.chunk_facts import ChunkFacts

GOOD: dict[str, Any] = {
    "request": 7,
    "attempt": 0,
    "group": 0,
    "is_probe": False,
    "weights_version": 0,
    "model": "m",
    "num_prompt_tokens": 3,
    "max_left": 100,
    "load": True,
    "has_turns": False,
    "num_fresh": 0,
    "run": "r",
    "drafts": "grouped",
    "ended_groups": [],
    "lease": 64,
    "logprobs": True,
}
HINTS = typing.get_type_hints(ChunkFacts, include_extras=True)
REQUIRED = tuple(one.name for one in msgspec.structs.fields(ChunkFacts) if one.required)
BAD: list[tuple[str, Any]] = [
    *((name, value) for name, kind in HINTS.items() for value in bad_values(kind) if value != ""),
    ("num_prompt_tokens", 20),
    ("num_fresh", 19),
    ("run", "a/b"),
    ("model", "\ud800"),
    ("ended_groups", [-1]),
]
"""Also of another request, for one of 19 tokens."""
NUM_TOKENS = 19
