# SPDX-License-Identifier: Apache-2.0
"""Check every response of a run against what was asked for, without computing a token.

Invariants
  1. Each (prompt, index) that was asked for has exactly one response, and no other has one.
  2. Each response ended by itself, with the seed that follows from the run's, under one version of the weights.
  3. Its counts agree, its tokens are in the vocabulary, its end follows from its tokens, and so does its text.
  4. With an environment, its turns and its mask agree with its tokens (turns_check.py). Without, it has none.

What breaks one of them is a finding of one kind; a response counts once under each kind. Responses without a finding
are `sound`: they can be scored.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field

from seer.buffer import request_seed
from seer.engine.stop_strings import Decode
from seer.engine.text_codec import TextCodec
from seer.types import FinishReason, Group, Response, Sampling
from seer.verification.turn_ends import TurnEnds
from seer.verification.turns_check import end_of_turns, turn_problems

KINDS = {
    "missing": "missing responses",
    "doubled": "doubled responses",
    "unknown": "not asked for",
    "unfinished": "failed or cancelled",
    "seed": "of another seed",
    "weights_version": "of other versions",
    "counts": "counts disagree",
    "vocabulary": "unknown tokens",
    "turns": "turns disagree",
    "mask": "masks disagree",
    "end": "ends disagree",
    "text": "texts disagree",
    "journal": "not as in journal",
    "settings": "other settings",
    "weights": "other weights",
}
"""The kinds of findings, and the line that names each. The last two are about the run, not about a response."""


@dataclass(slots=True)
class Finding:
    """What is wrong with some responses."""

    kind: str
    count: int
    first: str
    """Where it was met first, and what was got and expected there."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Asked:
    """What a run was asked for."""

    groups: Sequence[Group]
    codec: TextCodec | None
    vocab_size: int
    eos_token_ids: frozenset[int]
    decode: Decode | None = None
    """Special tokens as their text, as stop strings are looked for."""
    forced_lengths: Mapping[tuple[int, int], int] | None = None
    """Of each response, where end tokens were ignored."""
    has_turns: bool = False
    """Whether responses talked to an environment."""

    def ends(self, sampling: Sampling) -> TurnEnds:
        """What ends a response, or with turns a turn."""
        return TurnEnds(sampling, self.eos_token_ids, self.decode)


@dataclass(slots=True)
class ResultsCheck:
    """What checking a run's responses found."""

    findings: dict[str, Finding] = field(default_factory=dict)
    sound: list[Response] = field(default_factory=list)
    num_responses: int = 0

    def add(self, kind: str, what: str) -> None:
        """Count a finding."""
        found = self.findings.setdefault(kind, Finding(kind, 0, what))
        found.count += 1

    def ordered(self) -> list[Finding]:
        """The findings in the order of their kinds."""
        return [self.findings[kind] for kind in KINDS if kind in self.findings]


def check_results(asked: Asked, responses: Iterable[Response]) -> ResultsCheck:
    """Check all responses of a run."""
    check = ResultsCheck()
    seen: set[tuple[int, int]] = set()
    version: int | None = None
    for response in responses:
        check.num_responses += 1
        key, name = (response.group, response.index), _name(response)
        version = response.weights_version if version is None else version
        problems = list(_problems(asked, response))
        if response.weights_version != version:
            problems.append(("weights_version", f"version {response.weights_version}, the first has {version}"))
        if key in seen:
            problems.append(("doubled", "is there again"))
        seen.add(key)
        for kind, what in problems:
            check.add(kind, f"{name}: {what}")
        if not problems:
            check.sound.append(response)
    for group in asked.groups:
        for index in range(group.num_requests):
            if (group.id, index) not in seen:
                check.add("missing", f"response {index} of prompt {group.prompt_id!r}")
    return check


def _problems(asked: Asked, response: Response) -> Iterator[tuple[str, str]]:
    """Kind and description of all that is wrong with one response."""
    if not 0 <= response.group < len(asked.groups):
        yield "unknown", f"prompt {response.group} of {len(asked.groups)}"
        return
    group = asked.groups[response.group]
    if response.prompt_id != group.prompt_id or not 0 <= response.index < group.num_requests:
        yield "unknown", f"prompt {response.group} is {group.prompt_id!r} and has {group.num_requests} responses"
        return
    seed = request_seed(group.seed, response.index)
    if response.seed != seed:
        yield "seed", f"seed {response.seed}, the run's gives {seed}"
    yield from _count_problems(group, response)
    bad = next((token for token in response.token_ids if not 0 <= token < asked.vocab_size), None)
    if bad is not None:
        yield "vocabulary", f"token {bad}, the vocabulary has {asked.vocab_size}"
        return
    turns = list(_turn_problems(asked, response))
    yield from turns
    if not response.is_complete:
        yield "unfinished", f"{response.finish_reason.value}, {response.error or 'no error was given'}"
    elif not turns:
        yield from _end_problems(asked, group, response)
    text = asked.codec.decode(response.token_ids) if asked.codec is not None else None
    if response.text != text:
        yield "text", f"{_short(response.text)}, the tokens give {_short(text)}"


def _turn_problems(asked: Asked, response: Response) -> Iterator[tuple[str, str]]:
    if asked.has_turns:
        if len(response.logprobs) in (0, len(response.token_ids)):  # otherwise the counts say so
            yield from turn_problems(response)
    elif response.turns or response.loss_mask is not None or response.num_given_tokens:
        yield "turns", f"{len(response.turns)} turns, the run had no environment"


def _count_problems(group: Group, response: Response) -> Iterator[tuple[str, str]]:
    all_tokens = response.num_tokens + response.num_given_tokens
    expected = len(response.token_ids)
    num_logprobs = expected if group.sampling.logprobs else 0
    counts = {"num_tokens": (all_tokens, expected), "log-probabilities": (len(response.logprobs), num_logprobs)}
    if response.raw_logprobs is not None:
        counts["raw log-probabilities"] = len(response.raw_logprobs), num_logprobs
    wrong = [f"{count} {name}" for name, (count, right) in counts.items() if count != right]
    if response.num_prompt_tokens != group.num_prompt_tokens:
        wrong.append(f"{response.num_prompt_tokens} prompt tokens of {group.num_prompt_tokens}")
    if wrong:
        yield "counts", f"{', '.join(wrong)}; {len(response.token_ids)} tokens"


def _end_problems(asked: Asked, group: Group, response: Response) -> Iterator[tuple[str, str]]:
    if asked.has_turns:
        expected = end_of_turns(response, group.sampling, asked.ends(group.sampling))
    else:
        expected = _expected_end(asked, group, response)
    if isinstance(expected, str):
        yield "end", expected
    elif response.finish_reason is not expected:
        yield "end", f"{response.finish_reason.value}, the tokens give {expected.value}"
    elif response.error is not None:
        yield "end", f"{response.finish_reason.value}, with the error {_short(response.error)}"


def _expected_end(asked: Asked, group: Group, response: Response) -> FinishReason | str:
    """How a response with these tokens ended, or why it cannot have ended there."""
    tokens, sampling = response.token_ids, group.sampling
    if asked.forced_lengths is not None:
        length = asked.forced_lengths.get((response.group, response.index))
        return FinishReason.STOP if len(tokens) == length else f"{len(tokens)} tokens, {length} were forced"
    ends = asked.ends(sampling)
    end = ends.first(tokens)
    if end is None:
        is_full = len(tokens) == sampling.max_tokens
        return FinishReason.LENGTH if is_full else f"{len(tokens)} tokens have no end, max_tokens={sampling.max_tokens}"
    if ends.is_early(tokens):
        return f"it stops at {len(tokens)} tokens, min_tokens={sampling.min_tokens}"
    return FinishReason.STOP if end == len(tokens) else f"it has {len(tokens)} tokens, the first {end} end it"


def _name(response: Response) -> str:
    return f"response {response.index} of prompt {response.prompt_id!r}"


def _short(text: str | None) -> str:
    return repr(text if text is None or len(text) <= 40 else f"{text[:40]}...")
