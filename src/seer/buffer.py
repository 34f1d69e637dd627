# SPDX-License-Identifier: Apache-2.0
"""The request buffer: all rollout work enters here, and only the buffer changes a request's state.

    admit ──> WAITING ──start──> IN_FLIGHT ──apply(limit | parked)──> WAITING ...
                 │                  │  └──apply(stop | length)──> FINISHED
                 │                  └──lose (its instance died)──> WAITING, with every token received so far
                 └──────cancel──────┴──────────────────────────> FINISHED (cancelled)
                        fail  ──────────────────────────────────> FAILED

With turns, a request that stops or has no room left is handed over to its environment instead:

    IN_FLIGHT ──apply(stop | length)──> AT_TOOL ──answer──> WAITING, with the given tokens
                                           └──conclude | cancel──> FINISHED, fail ──> FAILED

Other modules may read a `Request` (seer.request); only this one writes it.

Invariants
  1. Every admitted request ends in exactly one terminal state, FINISHED or FAILED, and never leaves it.
  2. A token is counted once: outputs of an attempt that has ended are ignored; an attempt never exceeds its lease.
  3. num_admitted == num_waiting + num_in_flight + num_at_tool + num_ended at all times.
  4. A request has its `Response` from the moment it ends; its group hands out the same object.
  5. A request has a lease exactly while it is in flight, so no lease outlives its instance.
  6. With turns, generated and given tokens alternate; given ones have no log-probability and count for no limit but
     that of the whole context.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from seer.request import Request, RequestState, chunk_of, end_turn, request_seed, response_of
from seer.types import (
    Chunk,
    ChunkEnd,
    ChunkOutput,
    FinishReason,
    Group,
    GroupResult,
    Lease,
    Restored,
    TokenSpan,
    low_lease_tokens,
)

__all__ = ["Request", "RequestBuffer", "RequestState", "chunk_of", "request_seed"]


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
        self.num_at_tool = 0
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

    def restore(self, request: Request, past: Restored, now_s: float) -> None:
        """Give a request that has not started what an interrupted run had of it."""
        self._expect(request, RequestState.WAITING, "restore")
        assert request.attempt == 0, f"{request} has started"
        for span in past.spans:
            self._take_span(request, span)
        assert request.num_generated <= request.max_tokens, f"{request} was restored beyond its limit"
        if past.finish_reason is not None:
            if request.group.has_turns:
                self._hand_over(request, past.finish_reason, None)
            self._end(request, RequestState.FINISHED, past.finish_reason, now_s, reward=past.reward)
        elif past.has_handed_over or (request.group.has_turns and not request.remaining_limit):
            self._hand_over(request, FinishReason.STOP if request.remaining_limit else FinishReason.LENGTH, now_s)

    def _take_span(self, request: Request, span: TokenSpan) -> None:
        """Append a restored span; where given and generated tokens meet, a turn has ended."""
        if span.is_given:
            end_turn(request, "generated", None, None)
            self._give(request, len(span.ids), span)
            end_turn(request, "given", None, None)
        else:
            request.spans.append(span)
            request.num_generated += len(span.ids)
            request.num_fresh = 0

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
        if request.turn_began_s is None:
            request.turn_began_s = now_s
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
            request.num_fresh = 0
            request.chunk_remaining -= output.num_tokens
            if output.span is not None:
                assert output.span.weights_version == self.weights_version, (
                    f"tokens of weights version {output.span.weights_version}, rollout of {self.weights_version}"
                )
                assert len(output.span.logprobs) == (output.num_tokens if request.group.sampling.logprobs else 0), (
                    f"{output.num_tokens} tokens with {len(output.span.logprobs)} log-probabilities: {request}"
                )
                request.spans.append(output.span.as_kept())
        if output.end is None:
            return request
        if output.end is ChunkEnd.STOP:
            self._stop(request, FinishReason.STOP, now_s)
        elif request.remaining_limit == 0:
            self._stop(request, FinishReason.LENGTH, now_s)
        else:
            self._to_waiting(request)
        return request

    def answer(self, request: Request, token_ids: Sequence[int] | None, num_tokens: int, now_s: float) -> None:
        """The environment gave these tokens, or only their number in simulation: the request waits again with them."""
        self._expect(request, RequestState.AT_TOOL, "answer")
        assert 0 < num_tokens <= self.room_tokens(request), f"{num_tokens} tokens given to {request}"
        span = TokenSpan(token_ids, (), self.weights_version, is_given=True) if token_ids is not None else None
        self._give(request, num_tokens, span)
        end_turn(request, "given", request.turn_began_s, now_s)
        request.state = RequestState.WAITING
        request.turn_reason = request.turn_began_s = None
        self.num_at_tool -= 1
        self.num_waiting += 1

    def run_out(self, request: Request) -> None:
        """The environment gave more tokens than there is room for: the response can only end."""
        self._expect(request, RequestState.AT_TOOL, "run out of room")
        request.turn_reason = FinishReason.LENGTH

    def conclude(self, request: Request, reward: float | None, now_s: float) -> None:
        """The environment ended the response."""
        self._expect(request, RequestState.AT_TOOL, "conclude")
        assert request.turn_reason is not None, f"{request} was not handed over"
        self._end(request, RequestState.FINISHED, request.turn_reason, now_s, reward=reward)

    def room_tokens(self, request: Request) -> int:
        """Tokens that its environment may give, so that at least one more can be generated."""
        most = request.group.max_context_tokens
        assert most is not None, f"{request} has no turns"
        return max(0, most - request.num_tokens - 1) if request.remaining_limit else 0

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
        self._end(request, RequestState.FAILED, FinishReason.FAILED, now_s, error=error)

    @property
    def has_complete_groups(self) -> bool:
        """Whether `take_complete_groups` returns any."""
        return bool(self._complete_groups)

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
        assert self.num_at_tool == states.count(RequestState.AT_TOOL), "requests at their tools miscounted"
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
                given = sum(len(span.ids) for span in request.spans if span.is_given)
                assert given == request.num_given, f"{request} lost given tokens"
                num_tokens = sum(len(span.ids) for span in request.spans)
                assert num_tokens == request.num_generated + given, f"{request} lost tokens"

    def _stop(self, request: Request, reason: FinishReason, now_s: float) -> None:
        """A turn, or the response, has ended."""
        if request.group.has_turns:
            self._hand_over(request, reason, now_s)
        else:
            self._end(request, RequestState.FINISHED, reason, now_s)

    def _hand_over(self, request: Request, reason: FinishReason, now_s: float | None) -> None:
        if request.state is RequestState.IN_FLIGHT:
            self.num_in_flight -= 1
            self._end_lease(request)
        else:
            self.num_waiting -= 1
        self.num_at_tool += 1
        request.state = RequestState.AT_TOOL
        end_turn(request, "generated", request.turn_began_s, now_s)
        request.turn_began_s, request.turn_reason = now_s, reason

    @staticmethod
    def _give(request: Request, num_tokens: int, span: TokenSpan | None) -> None:
        """Append given tokens; what is left of the context limits what may be generated."""
        if span is not None:
            request.spans.append(span)
        request.num_given += num_tokens
        request.num_fresh = num_tokens
        request.turn_start = request.num_generated
        most = request.group.max_context_tokens
        if most is not None:
            request.max_tokens = min(request.max_tokens, request.num_generated + max(0, most - request.num_tokens))

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
        self,
        request: Request,
        state: RequestState,
        finish_reason: FinishReason,
        now_s: float,
        *,
        error: str | None = None,
        reward: float | None = None,
    ) -> None:
        if request.state is RequestState.IN_FLIGHT:
            self.num_in_flight -= 1
            self._end_lease(request)
        elif request.state is RequestState.AT_TOOL:
            self.num_at_tool -= 1
        else:
            self._expect(request, RequestState.WAITING, "end")
            self.num_waiting -= 1
        if request.group.has_turns:
            is_given = request.state is RequestState.AT_TOOL
            end_turn(request, "given" if is_given else "generated", request.turn_began_s, now_s)
        request.state = state
        request.finish_reason = finish_reason
        request.response = response_of(request, finish_reason, self.weights_version, now_s, error=error, reward=reward)
        self.num_ended += 1
        group = request.group.id
        num_unfinished = self._unfinished_of_group[group] - 1
        self._unfinished_of_group[group] = num_unfinished
        if not num_unfinished:
            self._complete_groups.append(group)

    @staticmethod
    def _expect(request: Request, state: RequestState, move: str) -> None:
        assert request.state is state, f"cannot {move} {request}: it is {request.state.value}, not {state.value}"


def _group_result(members: list[Request]) -> GroupResult:
    group = members[0].group
    responses = tuple(member.response for member in members if member.response is not None)
    assert len(responses) == len(members), f"group {group.id} has requests that have not ended"
    return GroupResult(group.family, group.prompt_id, () if group.prompt is None else group.prompt, responses)
