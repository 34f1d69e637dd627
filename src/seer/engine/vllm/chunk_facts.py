# SPDX-License-Identifier: Apache-2.0
"""The facts of a chunk that travel with a request through vLLM, for our schedulers, drafts on the GPU, and the pool.

They lie in `SamplingParams.extra_args`, which a client of a vLLM server can set too. Everything that needs them reads
them here. What does not have their form is not a chunk of ours: it runs as any request of vLLM's does, without a
lease, drafts and a place in the pool, and must not end the engine. Does not import vLLM.

Invariant: numbers of tokens that are read here lie within the request that they came with, so they may become offsets.
"""

from __future__ import annotations

import logging
import re
from typing import Annotated, Any

import msgspec

from seer.ranges import Count, CountOrZero, Seed
from seer.types import DraftMode

log = logging.getLogger(__name__)

EXTRA = "seer"
"""Key of the facts in `SamplingParams.extra_args`."""
NameOrNone = Annotated[str, msgspec.Meta(pattern=r"\A[A-Za-z0-9._-]{0,64}\Z", description="0 to 64 plain characters")]


class ChunkFacts(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """What schedulers, drafts and the connector need of a chunk."""

    request: Seed
    attempt: CountOrZero
    group: Seed
    is_probe: bool = False
    weights_version: CountOrZero
    model: NameOrNone
    """Identity of the weights."""
    num_prompt_tokens: Count
    """The rest of vLLM's prompt is what the response has so far."""
    max_left: CountOrZero
    """Tokens that the whole response may still get."""
    load: bool
    """Whether KV may come from the pool."""
    has_turns: bool
    num_fresh: CountOrZero
    run: NameOrNone
    drafts: DraftMode
    ended_groups: Annotated[tuple[Seed, ...], msgspec.Meta(max_length=1 << 20)] = ()
    lease: Count | None = None
    """With vLLM's own scheduler there is none, and a chunk ends at its `max_tokens`."""
    logprobs: bool = True
    """Whether log-probabilities are wanted."""


class _Refusals:
    """Says the first of them: a client that sends many would fill the log."""

    def __init__(self) -> None:
        self.was_said = False

    def say(self, name: object, given: object, reason: object) -> None:
        if self.was_said:
            return
        self.was_said = True
        field = _FIELD.search(str(reason))
        got = repr(given.get(field[1]) if field and isinstance(given, dict) else given)
        got = got if len(got) <= 200 else f"{got[:197]}..."
        text = (
            "what request %r carries for Seer is not used, and it runs as a plain one: %s, got %s (others are not said)"
        )
        log.warning(text, name, reason, got)


refusals = _Refusals()
_FIELD = re.compile(r"`\$\.(\w+)")
"""In an error of msgspec."""


def read_facts(params: Any, num_tokens: int, *, name: object = None) -> ChunkFacts | None:
    """The facts that sampling parameters of vLLM carry for a request with so many tokens.

    None where there are none, they have another form, or they are of a longer request.
    """
    extra = getattr(params, "extra_args", None)
    given = extra.get(EXTRA) if isinstance(extra, dict) else None
    if given is None:
        return None
    try:
        facts = msgspec.convert(given, ChunkFacts)
    except (msgspec.ValidationError, UnicodeError, RecursionError) as error:
        refusals.say(name, given, error)
        return None
    if facts.num_prompt_tokens > num_tokens or facts.num_fresh >= num_tokens:
        refusals.say(name, given, f"num_prompt_tokens is at most {num_tokens}, num_fresh below it")
        return None
    return facts
