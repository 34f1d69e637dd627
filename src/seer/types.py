# SPDX-License-Identifier: Apache-2.0
"""The types that every layer shares. All are frozen but `Response`, which its run completes.

A *group* asks for several responses to one prompt. Each of them is a *request*. A request runs in *chunks*, and an
instance answers a chunk with a stream of *outputs*. How far a chunk may run is its *lease*, which can be extended while
it runs. The request's state is in `seer.buffer` and nowhere else.

A response may have *turns*: the model generates, hands over to an environment, and goes on after the tokens that the
environment gives. The context of a request is then its prompt, and spans of generated and given tokens in turn.

Token ids may be absent: a simulated instance generates lengths, not tokens. Code that decides anything therefore reads
the counts (`num_*_tokens`), never the ids.

What is made for every chunk or request is a `msgspec.Struct`, which is several times as fast to make as a frozen
dataclass: a simulation makes millions. The rest are dataclasses.
"""

from __future__ import annotations

import enum
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from typing import Literal, NamedTuple

import msgspec

from seer.errors import ConfigError
from seer.ranges import Count, CountOrZero, Probability, Share, StopString, Temperature, TokenId, check_fields

DraftMode = Literal["none", "own", "grouped", "grouped-paper"]
"""What a request may be drafted from: nothing, its own tokens, or those of its whole group, by our budget or by the
paper's."""

GROUP_DRAFTS: frozenset[DraftMode] = frozenset({"grouped", "grouped-paper"})
"""Modes in which siblings serve as drafts."""

BudgetRule = Literal["seer", "paper", "threshold"]
"""How it is decided how much to draft: the rules of `seer.speculation.budget`."""


def budget_rule(mode: DraftMode) -> BudgetRule:
    """The rule that a mode drafts by."""
    return "seer" if mode == "grouped" else "paper"


LEAST_TEMPERATURE = 1e-6
"""Of sampling that is not greedy: logits that are divided by far less become infinite, as those of a broken model."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Sampling:
    """How the tokens of a request are sampled. The defaults sample from the model's own distribution."""

    max_tokens: Count
    """The most tokens a response may have, its stop token included. With turns: the most that the model generates in
    all of them; what the environment gives does not count."""
    temperature: Temperature = 1.0
    """0 is greedy."""
    top_p: Share = 1.0
    top_k: Count | None = None
    """None: all tokens."""
    min_p: Probability = 0.0
    min_tokens: CountOrZero = 0
    """Stop tokens are not sampled before this many tokens, counted as for `max_tokens`."""
    stop_token_ids: tuple[TokenId, ...] = ()
    """Tokens that end a response, beside the model's own end-of-sequence tokens."""
    stop: tuple[StopString, ...] = ()
    """Strings that end a response, or with turns a turn: it ends with the token that completes one of them in the text
    that the model generated since the turn began. That token is kept. Special tokens count as their text."""
    ignore_eos: bool = False
    """Go on after the model's end-of-sequence tokens (`stop_token_ids` still stop)."""
    logprobs: bool = True
    """Whether responses carry log-probabilities. Tokens are the same without, and are checked to have one all the same;
    what is saved is carrying them."""

    def __post_init__(self) -> None:
        """Refuse impossible settings before anything expensive starts."""
        check_fields(self)
        if 0 < self.temperature < LEAST_TEMPERATURE:
            raise ConfigError(
                f"temperature={self.temperature:g} is out of range",
                hint=f"use 0 for greedy responses, or at least {LEAST_TEMPERATURE:g}",
            )
        if self.min_tokens > self.max_tokens:
            raise ConfigError(
                f"min_tokens={self.min_tokens} is out of range", hint=f"use 0 to max_tokens, {self.max_tokens}"
            )

    def end_tokens(self, eos_token_ids: Collection[int]) -> frozenset[int]:
        """Every token that ends a response of a model with these end-of-sequence tokens."""
        return frozenset(self.stop_token_ids if self.ignore_eos else (*self.stop_token_ids, *eos_token_ids))


@dataclass(frozen=True, slots=True, kw_only=True)
class Group:
    """One prompt and how many responses to it are wanted."""

    id: int
    """Dense and unique within a rollout."""
    num_requests: int
    num_prompt_tokens: int
    sampling: Sampling
    prompt: Sequence[int] | None = None
    """Token ids; None in simulation."""
    seed: int = 0
    """Each request's own seed is derived from this one and its index."""
    key: str | None = None
    """Names the prompt across epochs, so that lengths seen in an earlier epoch can serve as hints."""
    family: int = -1
    """Groups of one family draft from each other and share length estimates: members that came later, or turns of one
    conversation. Its own id unless given."""
    same_prompt_as: int = -1
    """A group with an equal prompt, whose KV it shares. Its own id unless given."""
    first_index: int = 0
    """Index of its first request within the family."""
    has_turns: bool = False
    """A request that stops is handed over to its environment, which lets it go on or ends it."""
    max_context_tokens: int | None = None
    """With turns: the most tokens of prompt and response together, given ones included."""
    home: int | None = None
    """The instance that has probably computed most of the prompt: its requests begin there, if it has room."""

    @property
    def prompt_id(self) -> str:
        """How responses name their prompt: its key, or its position."""
        return str(self.id) if self.key is None else self.key

    def __post_init__(self) -> None:
        """A group is never empty and its prompt, where given, has the length it states."""
        if self.family < 0:
            object.__setattr__(self, "family", self.id)
        if self.same_prompt_as < 0:
            object.__setattr__(self, "same_prompt_as", self.id)
        if self.num_requests < 1:
            raise ConfigError(f"group {self.id} asks for {self.num_requests} responses", hint="ask for at least 1")
        if self.num_prompt_tokens < 1:
            raise ConfigError(f"group {self.id} has an empty prompt", hint="a prompt needs at least one token")
        if self.prompt is not None and len(self.prompt) != self.num_prompt_tokens:
            raise ConfigError(
                f"group {self.id} states {self.num_prompt_tokens} prompt tokens and carries {len(self.prompt)}"
            )


@dataclass(frozen=True, slots=True, kw_only=True)
class InstanceLimits:
    """What an instance can hold; fixed while it runs."""

    kv_blocks: int
    block_size: int
    max_num_seqs: int
    """Requests it decodes at once; more wait inside it."""
    max_model_len: int
    """Longest prompt plus response it can serve."""

    @property
    def kv_tokens(self) -> int:
        """Tokens whose KV fits at once."""
        return self.kv_blocks * self.block_size

    def blocks(self, num_tokens: int) -> int:
        """Blocks that hold this many tokens of one request."""
        return -(-num_tokens // self.block_size)


class TokenSpan(msgspec.Struct, frozen=True, gc=False):
    """Consecutive tokens of one response, all sampled under one version of the weights, or all given.

    A driver keeps millions: neither a span nor its numbers, once they are tuples, cost Python's collector anything.
    """

    ids: Sequence[int]
    logprobs: Sequence[float]
    """Of each token under the distribution it was sampled from (after temperature, top-p, top-k and min-p); empty if
    the tokens were given, or if the sampling does not ask for any."""
    weights_version: int
    raw_logprobs: Sequence[float] | None = None
    """Of each token under the model's own distribution (temperature 1, nothing cut), where the instance reports it."""
    is_given: bool = False
    """Whether an environment gave them: the model did not sample them."""

    def __post_init__(self) -> None:
        """Every token that was sampled has its log-probability, or none has."""
        expected = 0 if self.is_given or not self.logprobs else len(self.ids)
        assert len(self.logprobs) == expected, f"{len(self.ids)} tokens, {len(self.logprobs)} log-probabilities"

    def as_kept(self) -> TokenSpan:
        """The same for long keeping: the collector stops looking at tuples of numbers, and walks lists every time."""
        raw = None if self.raw_logprobs is None else tuple(self.raw_logprobs)
        return TokenSpan(tuple(self.ids), tuple(self.logprobs), self.weights_version, raw, self.is_given)


class ChunkEnd(enum.Enum):
    """Why an instance stopped working on a chunk."""

    STOP = "stop"
    """The model ended the response."""
    LIMIT = "limit"
    """The chunk has generated all that its lease allows; the request may have more to come."""
    PARKED = "parked"
    """The driver ended the lease early; the request has more to come, and its KV is kept as after `LIMIT`."""
    ABORTED = "aborted"
    """The driver aborted it; the tokens generated so far were returned."""
    FAILED = "failed"
    """The instance could not go on; `ChunkOutput.error` says why."""


class Attempt(NamedTuple):
    """One chunk of a request, by number; names what runs on an instance."""

    request: int
    attempt: int


class Lease(msgspec.Struct, frozen=True, gc=False):
    """How many tokens an attempt may generate in all. Absolute, so that a repeated or late one does no harm."""

    request: int
    attempt: int
    max_tokens: int


LOW_LEASE_TOKENS = 32
"""What is left of a lease that runs low: covers the tokens that an instance generates until its news are answered.
Outputs come 16 tokens at a time."""


def low_lease_tokens(num_tokens: int) -> int:
    """A lease with this many tokens left runs low when only these are left: half of a short one."""
    return LOW_LEASE_TOKENS if num_tokens >= 2 * LOW_LEASE_TOKENS else -(-num_tokens // 2)


class Chunk(msgspec.Struct, frozen=True, kw_only=True, gc=False):
    """Work for an instance: continue one request by at most `max_tokens` tokens, or by what later leases allow."""

    request: int
    group: int
    attempt: int
    """Counts the chunks started for this request; outputs of any but the newest attempt are ignored."""
    num_prompt_tokens: int
    num_generated_tokens: int
    """Generated by earlier chunks, on any instance."""
    num_given_tokens: int = 0
    """Given by the request's environment between earlier chunks."""
    num_fresh_tokens: int = 0
    """Of these, the last ones, given after the last generated token: their KV was never computed."""
    turn_start: int = 0
    """Tokens that were generated before the present turn."""
    max_tokens: int
    """Its first lease."""
    sampling: Sampling
    seed: int
    """Sampling noise depends on this and a token's absolute position only, on engines that sample so."""
    weights_version: int
    prompt: Sequence[int] | None = None
    spans: tuple[TokenSpan, ...] = ()
    generated: Sequence[int] = ()
    """All ids of `spans` instead of them, on the way to another process: an instance needs no log-probabilities."""
    is_probe: bool = False
    load_kv: bool = True
    """Load from the pool what it holds of the KV that this instance lacks; if False, compute all of it again."""
    is_lease: bool = False
    """Whether `max_tokens` may be extended while it runs. An instance without a stream of its own (the simulator) then
    reports when a lease runs low."""
    has_turns: bool = False
    """The request may go on after a stop: its KV in the pool is kept until the driver frees it."""

    @property
    def num_context_tokens(self) -> int:
        """Tokens that precede the first one this chunk generates."""
        return self.num_prompt_tokens + self.num_generated_tokens + self.num_given_tokens

    def token_ids(self) -> list[int]:
        """Prompt and all tokens generated and given so far, for instances that compute on tokens."""
        assert self.prompt is not None, f"chunk of request {self.request} carries no token ids"
        ids = [*self.prompt, *self.generated]
        for span in self.spans:
            ids.extend(span.ids)
        return ids

    def without_logprobs(self) -> Chunk:
        """The same chunk as an instance needs it: a fifth of the bytes of one with many tokens."""
        if not self.spans:
            return self
        ids = [token for span in self.spans for token in span.ids]
        return msgspec.structs.replace(self, spans=(), generated=ids)


class ChunkOutput(msgspec.Struct, frozen=True, gc=False):
    """Tokens of a chunk since its last output, and how the chunk ended once it has."""

    request: int
    attempt: int
    instance: int
    num_tokens: int
    span: TokenSpan | None = None
    """The tokens themselves; None where the instance only simulates."""
    end: ChunkEnd | None = None
    error: str | None = None
    stop_token: int | None = None
    num_drafted: int = 0
    """Draft tokens verified for this output, and how many of them were accepted."""
    num_accepted: int = 0

    def __post_init__(self) -> None:
        """Counts and tokens never disagree."""
        assert self.span is None or len(self.span.ids) == self.num_tokens, (
            f"output of request {self.request}: {self.num_tokens} tokens stated, {len(self.span.ids)} carried"
        )


class FinishReason(enum.Enum):
    """How a request ended; each ends in exactly one of these."""

    STOP = "stop"
    """The model ended the response."""
    LENGTH = "length"
    """The response reached `max_tokens`."""
    CANCELLED = "cancelled"
    FAILED = "failed"

    @property
    def is_complete(self) -> bool:
        """Whether the response ended by itself: the model stopped, or the length limit was reached."""
        return self is FinishReason.STOP or self is FinishReason.LENGTH


class Turn(msgspec.Struct, frozen=True):
    """A part of a response: tokens that the model generated without a break, or what the environment gave after them.

    Times are as in its `Response`; None where an interrupted run had them.
    """

    kind: Literal["generated", "given"]
    start: int
    """Its tokens are `token_ids[start:end]`. The environment's last answer has none."""
    end: int
    began_s: float | None
    """Generated: when its first chunk was handed to an instance. Given: when the environment was called."""
    ended_s: float | None


class Response(msgspec.Struct, kw_only=True):
    """One ended request, and one line of a results file. The buffer makes it; a `Run` adds text and reward.

    Times are seconds: on the rollout loop's clock at first, since the run began once the `Run` has completed it.
    """

    group: int
    """Position of its prompt in the run."""
    prompt_id: str
    index: int
    """Which of the group's responses it is, from 0."""
    text: str | None = None
    """None where the model has no tokenizer, and in simulation."""
    token_ids: list[int] = []
    """All tokens after the prompt, in order, those that an environment gave included; empty in simulation."""
    logprobs: list[float] = []
    """Of each token under the distribution it was sampled from; 0 for given tokens. Empty if none are asked for."""
    raw_logprobs: list[float] | None = None
    """Of each token under the model's own distribution, where the instance reports it; 0 for given tokens."""
    loss_mask: list[int] | None = None
    """With turns: 1 for each token that the model generated, 0 for each that was given. None: all were generated."""
    turns: list[Turn] = []
    """In order, generated and given alternately; empty without an environment."""
    finish_reason: FinishReason
    weights_version: int
    """Version of the weights that every token was sampled under."""
    seed: int
    num_prompt_tokens: int
    num_tokens: int
    """Generated ones."""
    num_given_tokens: int = 0
    queued_s: float
    started_s: float | None
    """When its first chunk was handed to an instance; None if none ever was."""
    finished_s: float
    num_chunks: int
    num_migrations: int
    error: str | None = None
    """Why it failed."""
    reward: float | None = None
    reward_error: str | None = None
    """Why there is no reward, where one was asked for."""

    @property
    def is_complete(self) -> bool:
        """Whether it ended by itself: the model stopped, or the length limit was reached."""
        return self.finish_reason.is_complete


@dataclass(frozen=True, slots=True)
class Restored:
    """What an interrupted run had generated for a request, and how the request ended if it had."""

    spans: tuple[TokenSpan, ...]
    finish_reason: FinishReason | None = None
    has_handed_over: bool = False
    """Whether its environment was to be asked next."""
    reward: float | None = None


@dataclass(frozen=True, slots=True)
class GroupResult:
    """All responses to one prompt, every one of them ended."""

    group: int
    """Position of its prompt in the run."""
    prompt_id: str
    prompt_token_ids: Sequence[int]
    """Empty in simulation."""
    responses: tuple[Response, ...]
    """In the order of their `index`."""

    @property
    def is_complete(self) -> bool:
        """Whether every response ended by itself."""
        return all(response.is_complete for response in self.responses)
