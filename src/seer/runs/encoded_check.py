# SPDX-License-Identifier: Apache-2.0
"""Checks of a prompt that has been turned into tokens; the last ones before it is handed to an instance.

Invariants
  1. No token outside the vocabulary reaches an instance, where it would be an index into memory.
  2. A run has no more responses than this machine can keep the state of.
  3. Whatever a results file repeats of a prompt can be written as UTF-8.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

from seer.errors import ConfigError, InputError
from seer.machine.memory import total_memory_bytes
from seer.ranges import Responses, TokenId, check

if TYPE_CHECKING:
    from seer.runs.prompts import EncodedPrompt
    from seer.types import Sampling

REQUEST_BYTES = 2048
"""Of the driver's memory for one request, without its tokens: 40,000 simulated ones took 1,768 bytes each."""


def refuse_unfit(
    encoded: EncodedPrompt,
    *,
    max_model_len: int,
    vocab_size: int | None,
    has_text: bool = True,
    refuse_sampling: Callable[[Sampling], None] | None = None,
) -> None:
    """Raise an error for a prompt that cannot run.

    Without `vocab_size` any token id of 31 bits will do. `refuse_sampling` raises for what the engine cannot sample.
    """
    check(encoded.n, Responses, "n")
    if refuse_sampling is not None:
        refuse_sampling(encoded.sampling)
    if encoded.sampling.stop and not has_text:
        raise InputError("the model has no tokenizer to find stop strings with", hint="stop_token_ids=...")
    _refuse_unknown_tokens(encoded, vocab_size)
    num_tokens, max_tokens = len(encoded.token_ids), encoded.sampling.max_tokens
    if num_tokens + max_tokens > max_model_len:
        raise InputError(
            f"{num_tokens} prompt tokens and max_tokens={max_tokens} exceed the {max_model_len} tokens that fit"
        )
    refuse_surrogates(encoded.prompt.id, "id")


def most_responses() -> int:
    """Responses that the driver can keep the state of."""
    return total_memory_bytes() // REQUEST_BYTES


def refuse_too_many(prompts: Sequence[EncodedPrompt]) -> None:
    """Refuse more responses than the driver can keep the state of, before any state is made."""
    num_responses, most = sum(prompt.n for prompt in prompts), most_responses()
    if num_responses > most:
        raise ConfigError(
            f"{len(prompts):,} prompts ask for {num_responses:,} responses, and this machine has memory for the state "
            f"of about {most:,}",
            hint=f"n={max(1, most // len(prompts)):,} or less, or fewer prompts at once",
        )


def refuse_no_room(prompt: EncodedPrompt, max_context_tokens: int | None) -> None:
    """Refuse a prompt that leaves no room for a response in the context that its conversation may have."""
    num_tokens = len(prompt.token_ids)
    if max_context_tokens is not None and num_tokens >= max_context_tokens:
        raise InputError(
            f"prompt {prompt.prompt.id} has {num_tokens} tokens, and prompt and response together may have "
            f"max_context_tokens={max_context_tokens}",
            hint=f"at least {num_tokens + 1}, or shorter prompts",
        )


def refuse_surrogates(text: str, what: str) -> None:
    """Refuse half of a character outside the first 65,536, which Python can hold and no file can."""
    try:
        text.encode()
    except UnicodeEncodeError as error:
        raise InputError(f"the {what} has half a character (a lone surrogate) at position {error.start}") from None


def _refuse_unknown_tokens(encoded: EncodedPrompt, vocab_size: int | None) -> None:
    if not encoded.token_ids:
        raise InputError("the prompt encodes to no token")
    check(list(encoded.token_ids), list[TokenId], "token_ids")
    largest = max((*encoded.token_ids, *encoded.sampling.stop_token_ids))
    if vocab_size is not None and largest >= vocab_size:
        raise InputError(f"token id {largest} is outside the model's vocabulary of {vocab_size} tokens")
