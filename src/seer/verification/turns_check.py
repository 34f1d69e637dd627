# SPDX-License-Identifier: Apache-2.0
"""Check the turns of a response against its tokens, without computing one.

Invariants
  1. Turns follow each other without a gap from the first token to the last, generated and given ones alternately. The
     first is generated, and only the environment's last answer may be empty.
  2. The loss mask is 1 for the tokens of generated turns and 0 for those of given ones; a given token has the
     log-probability 0, where there are any.
  3. A generated turn ends at its first stop token or stop string, and the last one there or at a limit.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from seer.types import FinishReason, Response, Sampling, Turn
from seer.verification.turn_ends import TurnEnds


def turn_problems(response: Response) -> Iterator[tuple[str, str]]:
    """Kind and description of what is wrong with turns and mask."""
    wrong = _layout(response.turns, len(response.token_ids))
    if wrong is not None:
        yield "turns", wrong
        return
    expected = [int(turn.kind == "generated") for turn in response.turns for _ in range(turn.start, turn.end)]
    if response.loss_mask != expected:
        yield "mask", _first_difference(response.loss_mask or [], expected)
    elif any(value for values in _logprobs(response) for value, own in zip(values, expected, strict=False) if not own):
        yield "mask", "a given token has a log-probability"


def end_of_turns(response: Response, sampling: Sampling, ends: TurnEnds) -> FinishReason | str:
    """How a response with these turns ended, or why it cannot have ended there; its layout is right."""
    generated = [turn for turn in response.turns if turn.kind == "generated"]
    num_generated, has_stopped = 0, False
    for turn in generated:
        tokens = response.token_ids[turn.start : turn.end]
        end = ends.first(tokens, num_generated)
        has_stopped = end is not None
        if end is not None and end < len(tokens):
            return f"the turn of tokens {turn.start} to {turn.end} has its end at {turn.start + end}"
        if ends.is_early(tokens, num_generated):
            return f"a turn stops at {num_generated + len(tokens)} generated tokens, min_tokens={sampling.min_tokens}"
        num_generated += len(tokens)
        if end is None and turn is not generated[-1]:
            return f"the turn of tokens {turn.start} to {turn.end} has no end, and another follows"
    return _last_end(response, sampling, num_generated, has_stopped=has_stopped)


def _last_end(response: Response, sampling: Sampling, num_generated: int, *, has_stopped: bool) -> FinishReason | str:
    if num_generated > sampling.max_tokens:
        return f"{num_generated} generated tokens, max_tokens={sampling.max_tokens}"
    last = next(turn for turn in reversed(response.turns) if turn.kind == "generated")
    if last is not response.turns[-1] and response.turns[-1].end > last.end:
        return "the environment answered, and no turn follows"
    is_length = response.finish_reason is FinishReason.LENGTH
    if is_length or num_generated == sampling.max_tokens:
        # Its limits, a full context, or an answer that did not fit: then the turn before it stopped by itself.
        return response.finish_reason if has_stopped else FinishReason.LENGTH
    if has_stopped:
        return FinishReason.STOP
    return f"{num_generated} generated tokens, the last turn has no end, max_tokens={sampling.max_tokens}"


def _layout(turns: Sequence[Turn], num_tokens: int) -> str | None:
    at = 0
    for number, turn in enumerate(turns):
        kind = "given" if number % 2 else "generated"
        is_empty = turn.end == turn.start and not (turn.kind == "given" and number == len(turns) - 1)
        if turn.kind != kind or turn.start != at or turn.end < turn.start or is_empty:
            return f"turn {number} is {turn.kind}, tokens {turn.start} to {turn.end}; expected {kind} from {at} on"
        at = turn.end
    return None if turns and at == num_tokens else f"the turns have {at} tokens, the response {num_tokens}"


def _first_difference(found: Sequence[int], expected: Sequence[int]) -> str:
    if len(found) != len(expected):
        return f"a mask of {len(found)} for {len(expected)} tokens"
    at = next(position for position, value in enumerate(expected) if found[position] != value)
    return f"the mask of token {at} is {found[at]}, its turn is {'generated' if expected[at] else 'given'}"


def _logprobs(response: Response) -> list[list[float]]:
    return [response.logprobs] + ([response.raw_logprobs] if response.raw_logprobs is not None else [])
