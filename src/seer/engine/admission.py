# SPDX-License-Identifier: Apache-2.0
"""Checks of a chunk before it starts, of its tokens before they are reported, and of new weights before they are taken.

The same checks and messages for every engine that computes on tokens.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Sequence

from seer.errors import InputError, InstanceError, NoProbability, Overloaded
from seer.types import Chunk, InstanceLimits, Sampling


def refuse_misplaced(
    chunk: Chunk, *, instance: int, weights_version: int, limits: InstanceLimits, in_flight: Collection[int]
) -> None:
    """Raise if the chunk is of other weights, runs here already or could become too long. For the simulator too."""
    who = f"instance {instance}"
    if chunk.weights_version != weights_version:
        raise InstanceError(
            f"request {chunk.request} wants weights version {chunk.weights_version}, {who} runs {weights_version}"
        )
    if chunk.request in in_flight:
        raise InstanceError(f"request {chunk.request} already runs on {who}")
    end_tokens = chunk.num_context_tokens + chunk.max_tokens
    if end_tokens > limits.max_model_len:
        raise InstanceError(
            f"request {chunk.request} could reach {end_tokens} tokens of {limits.max_model_len} at most",
            hint="lower max_tokens or use shorter prompts",
        )


def refuse_no_token(sampling: Sampling, *, eos_token_ids: Sequence[int], vocab_size: int) -> None:
    """Raise if no token may come before `min_tokens`: an engine would take that for a model without probabilities."""
    if not sampling.min_tokens:
        return
    if len(sampling.end_tokens(eos_token_ids)) >= vocab_size:  # all of them are of the vocabulary
        raise InputError(
            f"min_tokens={sampling.min_tokens}, and every token of the vocabulary ends a response",
            hint="min_tokens=0, or fewer stop_token_ids",
        )


def refuse_unfit(
    chunk: Chunk,
    *,
    instance: int,
    weights_version: int,
    limits: InstanceLimits,
    in_flight: Collection[int],
    max_waiting: int,
    vocab_size: int,
) -> None:
    """Raise if an instance with these requests in flight cannot run the chunk."""
    if chunk.prompt is None:
        raise InstanceError(f"request {chunk.request} carries no token ids", hint="only the simulator runs without")
    refuse_misplaced(chunk, instance=instance, weights_version=weights_version, limits=limits, in_flight=in_flight)
    end_tokens = chunk.num_context_tokens + chunk.max_tokens
    if limits.blocks(end_tokens) > limits.kv_blocks:
        raise Overloaded(
            f"request {chunk.request} needs {limits.blocks(end_tokens)} KV blocks of {limits.kv_blocks}",
            hint="give the instance more KV memory or use smaller chunks",
        )
    if len(in_flight) >= limits.max_num_seqs + max_waiting:
        raise Overloaded(f"instance {instance} already holds {len(in_flight)} chunks")
    if chunk.prompt and not 0 <= min(chunk.prompt) <= max(chunk.prompt) < vocab_size:
        raise InstanceError(f"request {chunk.request} has token ids outside 0..{vocab_size - 1}")


def refuse_new_weights(
    weights_version: int, *, instance: int, newest: int, num_in_flight: int, may_repeat: bool = False
) -> None:
    """Raise if chunks run, or if the version is not newer; `may_repeat`: the newest itself will do."""
    if num_in_flight:
        raise InstanceError(
            f"instance {instance} has {num_in_flight} chunks in flight, so its weights cannot change",
            hint="wait for them or abort them",
        )
    least = newest if may_repeat else newest + 1
    if weights_version < least:
        raise InstanceError(
            f"weights version {weights_version} is not newer than {newest}", hint=f"use {least} or more"
        )


def refuse_impossible(
    request: int,
    position: int,
    ids: Sequence[int],
    logprobs: Sequence[float],
    raw_logprobs: Sequence[float] | None,
    *,
    vocab_size: int | None,
) -> None:
    """Raise if a token is outside the vocabulary or has no probability; the first of them is at `position`.

    NaN, infinite or all-excluded logits show in the sampled token: its id or its log-probability is impossible. So the
    logits need no check of their own. Without log-probabilities only the ids are checked: the others were
    checked where they were left out.
    """
    if not ids:
        return
    logprobs = logprobs or [0.0] * len(ids)
    total = sum(logprobs) if raw_logprobs is None else sum(logprobs) + sum(raw_logprobs)
    if min(ids) >= 0 and (vocab_size is None or max(ids) < vocab_size) and math.isfinite(total):
        return
    for at, token in enumerate(ids):
        raw = logprobs[at] if raw_logprobs is None else raw_logprobs[at]
        is_known = token >= 0 and (vocab_size is None or token < vocab_size)
        if not is_known or not math.isfinite(logprobs[at] + raw):
            what = f"log-probability {raw:g}" if is_known else f"id {token}, vocabulary 0..{(vocab_size or 0) - 1}"
            raise NoProbability(
                f"request {request}, position {position + at}: the model gives no probability ({what}); "
                "its logits are NaN, infinite or all excluded",
                hint="the trainer diverged or the weights overflow in this dtype: load weights from before that",
            )
