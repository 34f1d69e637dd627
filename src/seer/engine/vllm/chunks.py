# SPDX-License-Identifier: Apache-2.0
"""Translates chunks to vLLM's sampling parameters, and vLLM's outputs to token spans.

Invariants
  1. vLLM keeps no state of a request between chunks: limits, stop tokens and the rest of `min_tokens` are counted from
     the response's first token.
  2. The newest runner samples with the noise of (seed, absolute position): every chunk has its request's seed, and the
     response does not depend on where chunks end. The older one starts a generator with each chunk, which must not
     repeat its numbers: there a chunk's seed is a function of (request seed, tokens generated before it).
  3. End-of-sequence tokens are ordinary stop tokens to vLLM, so a stop always names its token. vLLM adds the
     model's own to those that `min_tokens` keeps out, also where they are ignored; ours are the only ones.
  4. vLLM refuses `min_p` beside drafts, because its rejection sampling does not know it. Drafts on the GPU are verified
     by sampling every position as without drafts (gpu_drafts/sampler.py), `min_p` included, so that check is left out.
     Instances whose drafts are verified in another way refuse such chunks themselves.
  5. Log-probabilities come as vLLM's flat lists: one object per token would take much of the front end's time. They are
     computed for every request. Of one that does not ask for them only those arrive that are not finite
     (step_counting.py), or all of them with vLLM's own scheduler; either way none is passed on.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import msgspec
from vllm import SamplingParams
from vllm.logprobs import FlatLogprobs
from vllm.sampling_params import RequestOutputKind

from seer.engine.admission import refuse_impossible
from seer.engine.vllm.chunk_facts import EXTRA, ChunkFacts
from seer.kvpool.keys import chain_hash
from seer.types import Chunk, ChunkEnd, DraftMode, TokenSpan

if TYPE_CHECKING:
    from vllm.outputs import CompletionOutput


class ChunkParams(SamplingParams):
    """vLLM's sampling parameters, also where drafts meet `min_p`, and without end tokens that vLLM would add."""

    def update_from_generation_config(self, *_: Any, **__: Any) -> None:
        """Nothing to add: see the module's invariant 3."""

    def _validate_spec_decode(self, speculative_config: Any) -> None:
        """Nothing to refuse: see the module's invariant 4."""


def chunk_seed(seed: int, num_generated: int) -> int:
    """A 63-bit hash of (request seed, tokens generated before the chunk)."""
    digest = chain_hash(b"seer-vllm-seed", f"{seed}/{num_generated}".encode())
    return int.from_bytes(digest[:8], "little") >> 1


def sampling_params(
    chunk: Chunk, eos: tuple[int, ...], facts: ChunkFacts, *, noise_by_position: bool
) -> SamplingParams:
    """vLLM's sampling parameters for this chunk; `noise_by_position` says how this engine's runner samples."""
    sampling = chunk.sampling
    seed = chunk.seed if noise_by_position else chunk_seed(chunk.seed, chunk.num_generated_tokens)
    min_left = max(0, sampling.min_tokens - chunk.num_generated_tokens)
    # With a lease among the facts our scheduler ends the chunk (leased_scheduler.py).
    max_tokens = chunk.max_tokens if facts.lease is None else facts.max_left
    return ChunkParams(
        max_tokens=max_tokens,
        min_tokens=min(min_left, max_tokens),
        temperature=sampling.temperature,
        top_p=sampling.top_p,
        top_k=sampling.top_k or 0,
        min_p=sampling.min_p,
        seed=seed if sampling.temperature > 0 else None,
        stop_token_ids=sorted(sampling.end_tokens(eos)),
        ignore_eos=True,
        logprobs=0,  # of the sampled token only
        flat_logprobs=True,
        detokenize=False,
        skip_clone=True,  # these parameters are not shared
        output_kind=RequestOutputKind.DELTA,
        extra_args={EXTRA: msgspec.to_builtins(facts)},  # it goes to another process
    )


def request_facts(
    chunk: Chunk, model: str, run: str, drafts: DraftMode, ended_groups: Sequence[int] = (), *, lease: int | None = None
) -> ChunkFacts:
    """What the schedulers and the connector need of a chunk. Without our scheduler there is no `lease`."""
    return ChunkFacts(
        request=chunk.request,
        attempt=chunk.attempt,
        group=chunk.group,
        is_probe=chunk.is_probe,
        weights_version=chunk.weights_version,
        model=model,
        num_prompt_tokens=chunk.num_prompt_tokens,
        max_left=chunk.sampling.max_tokens - chunk.num_generated_tokens,
        load=chunk.load_kv,
        has_turns=chunk.has_turns,
        num_fresh=chunk.num_fresh_tokens,
        run=run,
        drafts=drafts,
        ended_groups=tuple(ended_groups),
        lease=lease,
        logprobs=chunk.sampling.logprobs,
    )


def token_span(chunk: Chunk, num_before: int, output: CompletionOutput, vocab_size: int) -> TokenSpan | None:
    """The tokens of one of vLLM's outputs; `num_before` were reported earlier in this chunk.

    Raises if the model gave no probability for one of them.
    """
    ids = list(output.token_ids)
    if not ids:
        return None
    flat = output.logprobs
    assert isinstance(flat, FlatLogprobs), f"expected flat log-probabilities, got {type(flat).__name__}"
    sampling, position = chunk.sampling, chunk.num_context_tokens + num_before
    if not sampling.logprobs:
        values = [0.0] * (len(ids) - len(flat.logprobs)) + flat.logprobs  # those that were left out are finite
        refuse_impossible(chunk.request, position, ids, values[-len(ids) :], None, vocab_size=vocab_size)
        return TokenSpan(ids, [], chunk.weights_version)
    # One entry per token: only the sampled token's was requested.
    assert flat.token_ids == ids, f"request {chunk.request}: log-probabilities of other tokens than those generated"
    values = flat.logprobs
    refuse_impossible(chunk.request, position, ids, values, None, vocab_size=vocab_size)
    # vLLM reports one number per token. Where sampling cuts nothing from the model's distribution it serves as both.
    masked = chunk.num_generated_tokens + num_before < sampling.min_tokens
    if sampling.temperature == 0:
        return TokenSpan(ids, [0.0] * len(ids), chunk.weights_version, None if masked else values)
    plain = sampling.temperature == 1 and sampling.top_p == 1 and sampling.top_k is None and sampling.min_p == 0
    return TokenSpan(ids, values, chunk.weights_version, values if plain and not masked else None)


_ENDS = {"stop": ChunkEnd.STOP, "length": ChunkEnd.LIMIT, "abort": ChunkEnd.ABORTED}
"""By vLLM's finish reasons; any other one is a failure."""


def chunk_end(output: CompletionOutput) -> tuple[ChunkEnd | None, int | None, str | None]:
    """How the chunk ended, the stop token and the error, as far as they apply."""
    reason = output.finish_reason
    if reason is None:
        return None, None, None
    end = _ENDS.get(reason, ChunkEnd.FAILED)
    stop = output.stop_reason if end is ChunkEnd.STOP and isinstance(output.stop_reason, int) else None
    return end, stop, f"vLLM ended it: {reason}" if end is ChunkEnd.FAILED else None
