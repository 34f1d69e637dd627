# SPDX-License-Identifier: Apache-2.0
"""The sampling fields that the endpoints share, and what they become: a `Sampling`, and what only the server needs.

Fields come in three kinds: those that do something; those that Seer has nothing for, which may be sent with the value
that asks for nothing and are refused otherwise; and those that carry no wish (`user`), which are not looked at.
"""

from __future__ import annotations

from typing import Annotated, Any, ClassVar

import msgspec
from msgspec import Meta

from seer.ranges import INT32_MAX, INT64_MAX, Count, CountOrZero, Probability, Responses, Share, Temperature, TokenId
from seer.serve.refusals import bad_request
from seer.types import Sampling

TopK = Annotated[int, Meta(ge=-1, le=INT32_MAX)]
SignedSeed = Annotated[int, Meta(ge=-INT64_MAX - 1, le=INT64_MAX)]
StopString = Annotated[str, Meta(min_length=1, max_length=1024)]
MAX_STOP_STRINGS = 64
_CONTEXT = "this model's maximum context length is"
"""As vLLM says it: verifiers, with which prime-rl generates, knows by these words that a trajectory is too long."""
_NO_PENALTIES = "responses are samples of the model's own distribution: there are no penalties"
_NO_GRAMMAR = "structured output is not supported"
_NO_BEST = "ask for n responses and choose among them"
_ONE_LOGPROB = "only the log-probability of the sampled token is reported: 0 or 1"

Neutral = dict[str, tuple[tuple[Any, ...], str]]
"""Fields by the values that ask for nothing (None always does), and why others are refused."""

_NEUTRAL: Neutral = {
    "repetition_penalty": ((1, 1.0), _NO_PENALTIES),
    "presence_penalty": ((0, 0.0), _NO_PENALTIES),
    "frequency_penalty": ((0, 0.0), _NO_PENALTIES),
    "logit_bias": (({},), "logits cannot be changed"),
    "bad_words": (([],), "logits cannot be changed"),
    "allowed_token_ids": (([],), "logits cannot be changed"),
    "best_of": ((1,), _NO_BEST),
    "use_beam_search": ((False,), "there is no beam search"),
    "length_penalty": ((1, 1.0), "there is no beam search"),
    "prompt_logprobs": ((), "log-probabilities of the prompt are not computed"),
    "truncate_prompt_tokens": ((), "truncate the prompt before you send it"),
    "structured_outputs": ((), _NO_GRAMMAR),
    "response_format": (({"type": "text"},), _NO_GRAMMAR),
    "logit_processors": (([],), "logits cannot be changed"),
    "add_special_tokens": ((False,), "no token is added to a prompt: write special tokens into its text"),
    "thinking_token_budget": ((-1,), "there is no budget for thinking"),
    "repetition_detection": ((), "responses end by themselves or at max_tokens"),
}


class SamplingFields(msgspec.Struct, kw_only=True, forbid_unknown_fields=True):
    """Fields of vLLM's `SamplingParams`, as far as they mean something here."""

    n: Responses | None = None
    seed: SignedSeed | None = None
    temperature: Temperature | None = None
    top_p: Share | None = None
    top_k: TopK | None = None
    min_p: Probability | None = None
    max_tokens: Count | None = None
    min_tokens: CountOrZero | None = None
    stop: StopString | list[StopString] | None = None
    stop_token_ids: list[TokenId] | None = None
    ignore_eos: bool | None = None
    include_stop_str_in_output: bool | None = None

    repetition_penalty: Any = None
    presence_penalty: Any = None
    frequency_penalty: Any = None
    logit_bias: Any = None
    bad_words: Any = None
    allowed_token_ids: Any = None
    best_of: Any = None
    use_beam_search: Any = None
    length_penalty: Any = None
    prompt_logprobs: Any = None
    truncate_prompt_tokens: Any = None
    structured_outputs: Any = None
    response_format: Any = None
    logit_processors: Any = None
    add_special_tokens: Any = None
    thinking_token_budget: Any = None
    repetition_detection: Any = None

    skip_special_tokens: bool | None = None
    spaces_between_special_tokens: Any = None
    detokenize: Any = None
    output_kind: Any = None
    cache_salt: Any = None
    priority: Any = None
    user: Any = None

    default_max_tokens: ClassVar[int | None] = None
    """Where none is given; None: what the context leaves."""
    clamps_max_tokens: ClassVar[bool] = False
    """Whether a response that may be longer than the context leaves ends there (vLLM's token endpoint, and its `LLM`,
    which `trl vllm-serve` calls), or is refused (the endpoints of OpenAI and SGLang)."""

    @property
    def num_responses(self) -> int:
        """Responses to each prompt."""
        return self.n or 1

    def sampling(self, num_prompt_tokens: int, max_model_len: int, *, with_logprobs: bool) -> Sampling:
        """How the responses to a prompt of this length are sampled, and whether log-probabilities are answered."""
        room = max_model_len - num_prompt_tokens
        if room < 1:
            raise bad_request(
                f"{_CONTEXT} {max_model_len:,} tokens with the response; the prompt has {num_prompt_tokens:,} tokens",
                hint="shorten the prompt",
                param="prompt",
            )
        max_tokens, min_tokens = self.max_tokens or min(room, self.default_max_tokens or room), self.min_tokens or 0
        if max_tokens > room and self.clamps_max_tokens:
            max_tokens, min_tokens = room, min(min_tokens, room)
        if max_tokens > room:
            raise bad_request(
                f"{_CONTEXT} {max_model_len:,} tokens with the response; the prompt has {num_prompt_tokens:,} tokens, "
                f"and max_tokens={max_tokens:,}",
                hint=f"use at most {room:,}",
                param="max_tokens",
            )
        top_k = None if self.top_k in (None, 0, -1) else self.top_k
        return Sampling(
            max_tokens=max_tokens,
            temperature=1.0 if self.temperature is None else self.temperature,
            top_p=1.0 if self.top_p is None else self.top_p,
            top_k=top_k,
            min_p=self.min_p or 0.0,
            min_tokens=min_tokens,
            stop_token_ids=tuple(self.stop_token_ids or ()),
            stop=self.stop_strings,
            ignore_eos=bool(self.ignore_eos),
            logprobs=with_logprobs,
        )

    @property
    def group_seed(self) -> int | None:
        """The seed of the group; a negative one without its sign bit."""
        return None if self.seed is None else self.seed & INT64_MAX

    def check_supported(self) -> None:
        """Refuse values that ask for something that Seer does not do."""
        refuse_unsupported(self, _NEUTRAL | {"best_of": ((1, self.num_responses), _NO_BEST)})
        if isinstance(self.stop, list) and len(self.stop) > MAX_STOP_STRINGS:
            raise bad_request(f"{len(self.stop)} stop strings", hint=f"use at most {MAX_STOP_STRINGS}", param="stop")

    @property
    def stop_strings(self) -> tuple[str, ...]:
        """Texts that end a response."""
        return (self.stop,) if isinstance(self.stop, str) else tuple(self.stop or ())


def refuse_unsupported(fields: msgspec.Struct, neutral: Neutral) -> None:
    """Refuse values of these fields that ask for something."""
    for name, (harmless, why) in neutral.items():
        value = getattr(fields, name)
        if value is not None and value not in harmless:
            raise bad_request(f"{name}={str(value)[:60]} is not supported", hint=why, param=name)


def wants_logprobs(num: int | None, *, field: str = "logprobs") -> bool:
    """Whether log-probabilities are asked for: 0 and 1 both mean those of the sampled tokens."""
    if num is not None and num not in (0, 1):
        raise bad_request(f"{field}={num} is not supported", hint=_ONE_LOGPROB, param=field)
    return num is not None
