# SPDX-License-Identifier: Apache-2.0
"""A request: one response of a group, from its prompt to its end, with all that is known of it on the way.

State only. `seer.buffer` changes it, by the moves that are legal; every other module reads it.
"""

from __future__ import annotations

import enum
from collections.abc import Sequence
from typing import Literal

from seer.types import Chunk, FinishReason, Group, Response, TokenSpan, Turn


class RequestState(enum.Enum):
    """Where a request is in its life."""

    WAITING = "waiting"
    IN_FLIGHT = "in flight"
    AT_TOOL = "at its tool"
    """Its environment has been called, and it holds no slot and no memory of an instance."""
    FINISHED = "finished"
    FAILED = "failed"


class Request:
    """One response of a group, from prompt to its end. Read it anywhere; only the buffer writes it."""

    __slots__ = (
        "attempt",
        "chunk_remaining",
        "finish_reason",
        "group",
        "id",
        "index",
        "instance",
        "last_instance",
        "lease_tokens",
        "low_tokens",
        "max_tokens",
        "num_chunks",
        "num_fresh",
        "num_generated",
        "num_given",
        "num_migrations",
        "queued_s",
        "response",
        "seed",
        "spans",
        "started_s",
        "state",
        "turn_began_s",
        "turn_reason",
        "turn_start",
        "turns",
    )

    def __init__(self, id: int, group: Group, position: int, queued_s: float) -> None:
        self.id = id
        self.group = group
        self.index = group.first_index + position
        """Which response of its family it is."""
        self.seed = request_seed(group.seed, position)
        self.state = RequestState.WAITING
        self.max_tokens = _most_generated(group)
        """The most tokens this request may generate in all; lowered where given tokens leave less room."""
        self.num_generated = 0
        self.num_given = 0
        """Tokens that its environment gave."""
        self.num_fresh = 0
        """Of these, the last ones, after which nothing was generated yet."""
        self.turn_start = 0
        """Tokens it had generated when the present turn began."""
        self.spans: list[TokenSpan] = []
        self.attempt = 0
        self.instance: int | None = None
        """The instance it runs on now."""
        self.last_instance: int | None = group.home
        """The instance that computed its newest KV."""
        self.lease_tokens = 0
        """Tokens the running chunk may generate in all; 0 while it waits."""
        self.chunk_remaining = 0
        """Of these, tokens it may still generate."""
        self.low_tokens = 0
        """Its lease runs low when no more than this remains; 0 if it is not to be extended."""
        self.num_chunks = 0
        self.num_migrations = 0
        self.queued_s = queued_s
        self.started_s: float | None = None
        self.finish_reason: FinishReason | None = None
        self.response: Response | None = None
        """Made when it ends."""
        self.turns: list[Turn] = []
        self.turn_began_s: float | None = None
        """When the present turn began: its first chunk, or the call of its environment."""
        self.turn_reason: FinishReason | None = None
        """At its tool: how the turn ended, and so how the response ends if it does not go on."""

    @property
    def num_tokens(self) -> int:
        """Prompt, generated and given tokens: what its KV covers."""
        return self.group.num_prompt_tokens + self.num_generated + self.num_given

    @property
    def remaining_limit(self) -> int:
        """Tokens it may still generate at most."""
        return self.max_tokens - self.num_generated

    @property
    def num_turns(self) -> int:
        """Turns that the model has ended."""
        return sum(turn.kind == "generated" for turn in self.turns)

    @property
    def runs_low(self) -> bool:
        """Whether its lease should be extended now, if it is to stay."""
        remaining = self.chunk_remaining
        return 0 < self.low_tokens >= remaining and remaining < self.max_tokens - self.num_generated

    @property
    def is_probe(self) -> bool:
        """Whether it is the request that runs first, to show how long its group's responses are."""
        return self.index == 0

    @property
    def ended(self) -> bool:
        """Whether it is in a terminal state."""
        return self.state is RequestState.FINISHED or self.state is RequestState.FAILED

    def __repr__(self) -> str:
        return f"Request({self.id}, group {self.group.id}, {self.state.value}, {self.num_generated} tokens)"


def _most_generated(group: Group) -> int:
    """Tokens that a response may have, as far as its context has room for them."""
    most, limit = group.sampling.max_tokens, group.max_context_tokens
    return most if limit is None else min(most, max(1, limit - group.num_prompt_tokens))


def chunk_of(
    request: Request, weights_version: int, max_tokens: int, *, load_kv: bool = True, is_lease: bool = False
) -> Chunk:
    """A request's next chunk, as its instance gets it."""
    group = request.group
    return Chunk(
        request=request.id,
        group=group.family,
        attempt=request.attempt,
        num_prompt_tokens=group.num_prompt_tokens,
        num_generated_tokens=request.num_generated,
        num_given_tokens=request.num_given,
        num_fresh_tokens=request.num_fresh,
        turn_start=request.turn_start,
        max_tokens=max_tokens,
        sampling=group.sampling,
        seed=request.seed,
        weights_version=weights_version,
        prompt=group.prompt,
        spans=tuple(request.spans),
        is_probe=request.is_probe,
        load_kv=load_kv,
        is_lease=is_lease,
        has_turns=group.has_turns,
    )


def request_seed(group_seed: int, index: int) -> int:
    """The seed of one request: distinct within a group, and a function of nothing else."""
    # splitmix64's finaliser: neighbouring inputs give unrelated seeds.
    x = (group_seed * 0x9E3779B97F4A7C15 + index + 1) & 0xFFFFFFFFFFFFFFFF
    x = ((x ^ (x >> 30)) * 0xBF58476D1CE4E5B9) & 0xFFFFFFFFFFFFFFFF
    x = ((x ^ (x >> 27)) * 0x94D049BB133111EB) & 0xFFFFFFFFFFFFFFFF
    return (x ^ (x >> 31)) >> 1  # fits a signed 64-bit integer


def end_turn(
    request: Request, kind: Literal["generated", "given"], began_s: float | None, ended_s: float | None
) -> None:
    """Note the end of a turn: it has the tokens since the last one. A generated turn without a token is none."""
    start = request.turns[-1].end if request.turns else 0
    end = request.num_generated + request.num_given
    if end > start or kind == "given":
        request.turns.append(Turn(kind, start, end, began_s, ended_s))


def response_of(
    request: Request,
    finish_reason: FinishReason,
    weights_version: int,
    now_s: float,
    *,
    error: str | None,
    reward: float | None,
) -> Response:
    """The response of a request that ends now."""
    spans, group = request.spans, request.group  # no spans in simulation: its token lists stay empty
    is_scored = group.sampling.logprobs
    has_raw = is_scored and all(span.raw_logprobs is not None for span in spans if not span.is_given)
    return Response(
        group=group.family,
        prompt_id=group.prompt_id,
        index=request.index,
        token_ids=[token for span in spans for token in span.ids],
        logprobs=[value for span in spans for value in _or_zeros(span, span.logprobs)] if is_scored else [],
        raw_logprobs=[value for span in spans for value in _or_zeros(span, span.raw_logprobs)] if has_raw else None,
        loss_mask=[int(not span.is_given) for span in spans for _ in span.ids] if group.has_turns else None,
        turns=request.turns,
        finish_reason=finish_reason,
        weights_version=weights_version,
        seed=request.seed,
        num_prompt_tokens=group.num_prompt_tokens,
        num_tokens=request.num_generated,
        num_given_tokens=request.num_given,
        queued_s=request.queued_s,
        started_s=request.started_s,
        finished_s=now_s,
        num_chunks=request.num_chunks,
        num_migrations=request.num_migrations,
        error=error,
        reward=reward,
    )


def _or_zeros(span: TokenSpan, values: Sequence[float] | None) -> Sequence[float]:
    return [0.0] * len(span.ids) if span.is_given else values or ()
