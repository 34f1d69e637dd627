# SPDX-License-Identifier: Apache-2.0
"""The facts of a chunk that travel with a request through vLLM, as the KV connector reads them.

They lie in `SamplingParams.extra_args`, which a client of a vLLM server can set too: what does not have their form is
not a chunk of ours, and must not end the engine. Does not import vLLM.
"""

from __future__ import annotations

from typing import Any

import msgspec

from seer.ranges import Count, CountOrZero, Seed


class ChunkFacts(msgspec.Struct, frozen=True, kw_only=True):
    """What the connector needs; there are more fields for the schedulers."""

    request: Seed
    model: str
    weights_version: CountOrZero
    num_prompt_tokens: Count
    max_left: CountOrZero
    load: bool
    has_turns: bool
    num_fresh: CountOrZero


def read_facts(extra: object) -> ChunkFacts | None:
    """The facts, or None where there are none or they have another form."""
    if extra is None:
        return None
    try:
        return msgspec.convert(extra, ChunkFacts)
    except (msgspec.ValidationError, UnicodeError, RecursionError):
        return None


def extra_of(params: Any, name: str) -> object:
    """What sampling parameters of vLLM carry under a name; None if nothing."""
    extra = getattr(params, "extra_args", None)
    return extra.get(name) if isinstance(extra, dict) else None
