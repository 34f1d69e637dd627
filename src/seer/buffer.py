# SPDX-License-Identifier: Apache-2.0
"""The request buffer: all rollout work enters here, and only the buffer changes a request's state.

    admit ──> WAITING ──start──> IN_FLIGHT ──apply(limit | parked)──> WAITING ...
                 │                  │  └──apply(stop | length)──> FINISHED
                 │                  └──lose (its instance died)──> WAITING, with every token received so far
                 └──────cancel──────┴──────────────────────────> FINISHED (cancelled)
                        fail  ──────────────────────────────────> FAILED

Other modules may read a `Request`; only this one writes it.

Invariants
  1. Every admitted request ends in exactly one terminal state, FINISHED or FAILED, and never leaves it.
  2. A token is counted once: outputs of an attempt that has ended are ignored; an attempt never exceeds its lease.
  3. num_admitted == num_waiting + num_in_flight + num_ended at all times.
  4. A request has its `Response` from the moment it ends; its group hands out the same object.
  5. A request has a lease exactly while it is in flight, so no lease outlives its instance.
"""

from __future__ import annotations

import enum
from collections.abc import Iterable

from seer.types import (
    Chunk,
    ChunkEnd,
    ChunkOutput,
    FinishReason,
    Group,
    GroupResult,
    Lease,
    Response,
    TokenSpan,
    low_lease_tokens,
)


class RequestState(enum.Enum):
    """Where a request is in its life."""

    WAITING = "waiting"
    IN_FLIGHT = "in flight"
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
        "num_chunks",
        "num_generated",
        "num_migrations",
        "queued_s",
        "response",
        "seed",
        "spans",
        "started_s",
        "state",
    )

    def __init__(self, id: int, group: Group, position: int, queued_s: float) -> None:
        self.id = id
        self.group = group
        self.index = group.first_index + position
        """Which response of its family it is."""
        self.seed = request_seed(group.seed, position)
        self.state = RequestState.WAITING
        self.num_generated = 0
        self.spans: list[TokenSpan] = []
        self.attempt = 0
        self.instance: int | None = None
        """The instance it runs on now."""
        self.last_instance: int | None = None
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

    @property
    def max_tokens(self) -> int:
        """The most tokens this request may generate in all."""
        return self.group.sampling.max_tokens

    @property
    def num_tokens(self) -> int:
        """Prompt and generated tokens: what its KV covers."""
        return self.group.num_prompt_tokens + self.num_generated

    @property
    def remaining_limit(self) -> int:
        """Tokens it may still generate at most."""
        return self.group.sampling.max_tokens - self.num_generated

    @property
    def runs_low(self) -> bool:
        """Whether its lease should be extended now, if it is to stay."""
        return 0 < self.low_tokens >= self.chunk_remaining and self.chunk_remaining < self.remaining_limit

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


class RequestBuffer:
    """All requests of one rollout and the legal moves between their states."""

    def __init__(self, weights_version: int = 0) -> None:
        self.weights_version = weights_version
        self._requests: dict[int, Request] = {}  # those that were not forgotten
        self._unfinished_of_group: dict[int, int] = {}
        self._requests_of_group: dict[int, list[Request]] = {}
        self._complete_groups: list[int] = []
        self.num_admitted = 0
        """Requests ever admitted."""
        self.num_waiting = 0
        self.num_in_flight = 0
        self.num_ended = 0

    @property
    def drained(self) -> bool:
        """Whether every admitted request has ended."""
        return self.num_ended == self.num_admitted

    def __getitem__(self, request: int) -> Request:
        return self._requests[request]

    def requests(self) -> Iterable[Request]:
        """All requests that were not forgotten, in order of admission."""
        return iter(self._requests.values())

    def admit(self, groups: Iterable[Group], now_s: float) -> list[Request]:
        """Take groups in; each becomes `num_requests` waiting requests, the first of them its probe."""
        admitted = []
        for group in groups:
            assert group.id not in self._requests_of_group, f"group {group.id} was admitted before"
            members = [Request(self.num_admitted + i, group, i, now_s) for i in range(group.num_requests)]
            self.num_admitted += len(members)
            self._requests.update((member.id, member) for member in members)
            self._requests_of_group[group.id] = members
            self._unfinished_of_group[group.id] = len(members)
            admitted.extend(members)
        self.num_waiting += len(admitted)
        return admitted

    def restore(
        self, request: Request, spans: Iterable[TokenSpan], finish_reason: FinishReason | None, now_s: float
    ) -> None:
        """Give a request that has not started the tokens that an interrupted run generated for it."""
        self._expect(request, RequestState.WAITING, "restore")
        assert request.attempt == 0, f"{request} has started"
        request.spans.extend(spans)
        request.num_generated = sum(len(span.ids) for span in request.spans)
        assert request.num_generated <= request.max_tokens, f"{request} was restored beyond its limit"
        if finish_reason is not None:
            self._end(request, RequestState.FINISHED, finish_reason, now_s)

    def members(self, group: int) -> list[Request]:
        """All requests of a group, in the order of their index."""
        return self._requests_of_group[group]

    def start(
        self,
        request: Request,
        instance: int,
        max_tokens: int,
        load_kv: bool,
        now_s: float,
        *,
        is_lease: bool = False,
    ) -> Chunk:
        """Move a waiting request in flight and return the chunk for its instance."""
        self._expect(request, RequestState.WAITING, "start")
        assert 1 <= max_tokens <= request.remaining_limit, f"chunk of {max_tokens} tokens for {request}"
        request.state = RequestState.IN_FLIGHT
        request.attempt += 1
        request.instance = instance
        request.chunk_remaining = request.lease_tokens = max_tokens
        request.low_tokens = low_lease_tokens(max_tokens) if is_lease else 0
        request.num_chunks += 1
        if request.started_s is None:
            request.started_s = now_s
        elif request.last_instance is not None and request.last_instance != instance:
            request.num_migrations += 1
        self.num_waiting -= 1
        self.num_in_flight += 1
        return chunk_of(request, self.weights_version, max_tokens, load_kv=load_kv, is_lease=is_lease)

    def extend(self, request: Request, num_tokens: int) -> Lease:
        """Let a request in flight generate this many tokens more; returns its lease for the instance."""
        self._expect(request, RequestState.IN_FLIGHT, "extend")
        assert 1 <= num_tokens <= request.remaining_limit - request.chunk_remaining, f"{num_tokens} more for {request}"
        request.lease_tokens += num_tokens
        request.chunk_remaining += num_tokens
        request.low_tokens = low_lease_tokens(request.chunk_remaining)
        return Lease(request.id, request.attempt, request.lease_tokens)

    def apply(self, output: ChunkOutput, now_s: float) -> Request | None:
        """Add an output's tokens to its request and change its state if the chunk ended; None if it was superseded."""
        request = self._requests.get(output.request)
        if request is None or request.state is not RequestState.IN_FLIGHT or output.attempt != request.attempt:
            return None
        assert output.num_tokens <= request.chunk_remaining, (
            f"{output.num_tokens} tokens from instance {output.instance}, {request.chunk_remaining} allowed: {request}"
        )
        if output.num_tokens:
            request.num_generated += output.num_tokens
            request.chunk_remaining -= output.num_tokens
            if output.span is not None:
                assert output.span.weights_version == self.weights_version, (
                    f"tokens of weights version {output.span.weights_version}, rollout of {self.weights_version}"
                )
                request.spans.append(output.span)
        if output.end is None:
            return request
        if output.end is ChunkEnd.STOP:
            self._end(request, RequestState.FINISHED, FinishReason.STOP, now_s)
        elif request.remaining_limit == 0:
            self._end(request, RequestState.FINISHED, FinishReason.LENGTH, now_s)
        else:
            self._to_waiting(request)
        return request

    def lose(self, request: Request) -> None:
        """Its instance is lost: it waits again, with every token received so far."""
        self._expect(request, RequestState.IN_FLIGHT, "lose")
        self._to_waiting(request)
        request.last_instance = None

    def cancel(self, request: Request, now_s: float) -> None:
        """End it early because the user cancelled; its tokens are kept."""
        if not request.ended:
            self._end(request, RequestState.FINISHED, FinishReason.CANCELLED, now_s)

    def fail(self, request: Request, error: str, now_s: float) -> None:
        """End it because it cannot be completed."""
        assert not request.ended, f"{request} has ended and cannot fail"
        self._end(request, RequestState.FAILED, FinishReason.FAILED, now_s, error)

    def take_complete_groups(self) -> list[GroupResult]:
        """Groups whose last request has ended since the last call, in that order."""
        complete, self._complete_groups = self._complete_groups, []
        return [_group_result(self._requests_of_group[group]) for group in complete]

    def forget(self, group: int) -> None:
        """Drop a complete group, so that a buffer without end does not grow."""
        assert not self._unfinished_of_group.pop(group), f"group {group} has requests that have not ended"
        for request in self._requests_of_group.pop(group):
            del self._requests[request.id]

    def check(self) -> None:
        """Assert the invariants; linear in the requests, for tests."""
        states = [request.state for request in self.requests()]
        assert self.num_waiting == states.count(RequestState.WAITING), "waiting requests miscounted"
        assert self.num_in_flight == states.count(RequestState.IN_FLIGHT), "requests in flight miscounted"
        num_forgotten = self.num_admitted - len(self._requests)
        num_ended = num_forgotten + sum(request.ended for request in self.requests())
        assert self.num_ended == num_ended, "ended requests miscounted"
        for request in self.requests():
            assert 0 <= request.num_generated <= request.max_tokens, f"{request} is over its limit"
            assert (request.finish_reason is not None) == (request.response is not None) == request.ended, (
                f"{request} has finish_reason {request.finish_reason} and response {request.response}"
            )
            in_flight = request.state is RequestState.IN_FLIGHT
            assert (request.instance is not None) == in_flight, f"{request} has instance {request.instance}"
            assert (request.lease_tokens > 0) == in_flight, f"{request} has a lease of {request.lease_tokens} tokens"
            if request.spans:
                assert sum(len(span.ids) for span in request.spans) == request.num_generated, f"{request} lost tokens"

    def _to_waiting(self, request: Request) -> None:
        request.state = RequestState.WAITING
        self._end_lease(request)
        self.num_in_flight -= 1
        self.num_waiting += 1

    @staticmethod
    def _end_lease(request: Request) -> None:
        request.last_instance, request.instance = request.instance, None
        request.lease_tokens = request.chunk_remaining = request.low_tokens = 0

    def _end(
        self, request: Request, state: RequestState, finish_reason: FinishReason, now_s: float, error: str | None = None
    ) -> None:
        if request.state is RequestState.IN_FLIGHT:
            self.num_in_flight -= 1
            self._end_lease(request)
        else:
            self._expect(request, RequestState.WAITING, "end")
            self.num_waiting -= 1
        request.state = state
        request.finish_reason = finish_reason
        request.response = _response(request, finish_reason, self.weights_version, now_s, error)
        self.num_ended += 1
        group = request.group.id
        num_unfinished = self._unfinished_of_group[group] - 1
        self._unfinished_of_group[group] = num_unfinished
        if not num_unfinished:
            self._complete_groups.append(group)

    @staticmethod
    def _expect(request: Request, state: RequestState, move: str) -> None:
        assert request.state is state, f"cannot {move} {request}: it is {request.state.value}, not {state.value}"


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
        max_tokens=max_tokens,
        sampling=group.sampling,
        seed=request.seed,
        weights_version=weights_version,
        prompt=group.prompt,
        spans=tuple(request.spans),
        is_probe=request.is_probe,
        load_kv=load_kv,
        is_lease=is_lease,
    )


def request_seed(group_seed: int, index: int) -> int:
    """The seed of one request: distinct within a group, and a function of nothing else."""
    # splitmix64's finaliser: neighbouring inputs give unrelated seeds.
    x = (group_seed * 0x9E3779B97F4A7C15 + index + 1) & 0xFFFFFFFFFFFFFFFF
    x = ((x ^ (x >> 30)) * 0xBF58476D1CE4E5B9) & 0xFFFFFFFFFFFFFFFF
    x = ((x ^ (x >> 27)) * 0x94D049BB133111EB) & 0xFFFFFFFFFFFFFFFF
    return (x ^ (x >> 31)) >> 1  # fits a signed 64-bit integer


def _response(
    request: Request, finish_reason: FinishReason, weights_version: int, now_s: float, error: str | None
) -> Response:
    spans, group = request.spans, request.group  # no spans in simulation: its token lists stay empty
    has_raw = all(span.raw_logprobs is not None for span in spans)
    return Response(
        group=group.family,
        prompt_id=group.prompt_id,
        index=request.index,
        token_ids=[token for span in spans for token in span.ids],
        logprobs=[value for span in spans for value in span.logprobs],
        raw_logprobs=[value for span in spans for value in span.raw_logprobs or ()] if has_raw else None,
        finish_reason=finish_reason,
        weights_version=weights_version,
        seed=request.seed,
        num_prompt_tokens=group.num_prompt_tokens,
        num_tokens=request.num_generated,
        queued_s=request.queued_s,
        started_s=request.started_s,
        finished_s=now_s,
        num_chunks=request.num_chunks,
        num_migrations=request.num_migrations,
        error=error,
    )


def _group_result(members: list[Request]) -> GroupResult:
    group = members[0].group
    responses = tuple(member.response for member in members if member.response is not None)
    assert len(responses) == len(members), f"group {group.id} has requests that have not ended"
    return GroupResult(group.family, group.prompt_id, () if group.prompt is None else group.prompt, responses)
