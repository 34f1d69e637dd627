# SPDX-License-Identifier: Apache-2.0
"""One-line engines for tests: `an_engine(folder)`, `a_chunk(3, prompt)`, `generate(engine, chunks)`, small drafters."""

from __future__ import annotations

import random
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch

from seer.drafting.base import Allowance, DraftAsk, DraftBudget, DraftTable, DraftTree
from seer.engine.local.assembly import EngineSettings, assemble, choose_limits
from seer.engine.local.engine import Engine
from seer.engine.local.model_config import read_config
from seer.types import Chunk, ChunkEnd, Sampling, TokenSpan

MAX_STEPS = 100_000
torch.set_num_threads(1)  # as an instance does


@dataclass
class Generated:
    """Everything a chunk generated."""

    ids: list[int] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)
    raw_logprobs: list[float] = field(default_factory=list)
    end: ChunkEnd | None = None
    stop_token: int | None = None
    num_drafted: int = 0
    num_accepted: int = 0

    def span(self, weights_version: int = 0) -> TokenSpan:
        return TokenSpan(self.ids, self.logprobs, weights_version, self.raw_logprobs)


def an_engine(
    folder: Path,
    *,
    kv_blocks: int = 512,
    block_size: int = 4,
    max_num_seqs: int = 8,
    **settings: Any,
) -> Engine:
    config = read_config(folder)
    chosen = EngineSettings(**settings)
    limits = choose_limits(config, chosen, kv_blocks=kv_blocks, block_size=block_size, max_num_seqs=max_num_seqs)
    return assemble(0, folder, config, limits, chosen)


def a_chunk(
    request: int,
    prompt: Sequence[int],
    *,
    max_tokens: int = 32,
    spans: tuple[TokenSpan, ...] = (),
    group: int = 0,
    seed: int | None = None,
    weights_version: int = 0,
    load_kv: bool = True,
    has_turns: bool = False,
    **sampling: Any,
) -> Chunk:
    defaults: dict[str, Any] = {"max_tokens": 10_000, "ignore_eos": True}
    return Chunk(
        request=request,
        group=group,
        attempt=1,
        num_prompt_tokens=len(prompt),
        num_generated_tokens=sum(len(span.ids) for span in spans if not span.is_given),
        num_given_tokens=sum(len(span.ids) for span in spans if span.is_given),
        num_fresh_tokens=len(spans[-1].ids) if spans and spans[-1].is_given else 0,
        turn_start=_turn_start(spans),
        max_tokens=max_tokens,
        sampling=Sampling(**defaults | sampling),
        seed=1000 + request if seed is None else seed,
        weights_version=weights_version,
        prompt=list(prompt),
        spans=spans,
        load_kv=load_kv,
        has_turns=has_turns,
    )


def _turn_start(spans: Sequence[TokenSpan]) -> int:
    """Generated tokens before the last given ones."""
    last = max((at for at, span in enumerate(spans) if span.is_given), default=0)
    return sum(len(span.ids) for span in spans[:last] if not span.is_given)


def generate(
    engine: Engine, chunks: Sequence[Chunk], *, arrive: Mapping[int, int] | None = None
) -> dict[int, Generated]:
    """Run chunks to their ends; `arrive` delays a request by this many steps."""
    answers = {chunk.request: Generated() for chunk in chunks}
    late = sorted(chunks, key=lambda chunk: (arrive or {}).get(chunk.request, 0))
    with torch.inference_mode():
        for step in range(MAX_STEPS):
            while late and (arrive or {}).get(late[0].request, 0) <= step:
                engine.add(late.pop(0))
            if not engine.busy:
                if not late:
                    break
                continue
            for output in engine.step():
                answer = answers[output.request]
                if output.span is not None:
                    answer.ids.extend(output.span.ids)
                    answer.logprobs.extend(output.span.logprobs)
                    answer.raw_logprobs.extend(output.span.raw_logprobs or ())
                assert answer.end is None, f"request {output.request} went on after its end"
                answer.end, answer.stop_token = output.end, output.stop_token
                answer.num_drafted += output.num_drafted
                answer.num_accepted += output.num_accepted
    engine.scheduler.blocks.check_integrity(active.blocks for active in engine.scheduler.running)
    return answers


def tokens_of(answers: Mapping[int, Generated]) -> dict[int, list[int]]:
    return {request: answer.ids for request, answer in answers.items()}


class FunctionDrafter:
    """Drafts what a function returns; keeps the tokens it observed."""

    def __init__(self, propose: Callable[[DraftAsk], DraftTree]) -> None:
        self.propose = propose
        self.observed: dict[int, list[int]] = {}

    def observe(self, group: int, request: int, tokens: Sequence[int], *, start: int) -> None:
        known = self.observed.setdefault(request, [])
        assert start <= len(known), f"request {request}: tokens from {start}, {len(known)} known"
        known[start:] = tokens

    def draft(self, asks: Sequence[DraftAsk]) -> list[DraftTree]:
        return [self.propose(ask) for ask in asks]

    def forget(self, request: int) -> None:
        pass


class SessionDrafter(FunctionDrafter):
    """A `FunctionDrafter` that opens sessions, for several steps at once."""

    def open_session(self, asks: Sequence[DraftAsk]) -> _Session:
        return _Session(self, asks)


class _Session:
    def __init__(self, drafter: SessionDrafter, asks: Sequence[DraftAsk]) -> None:
        self.drafter, self.asks = drafter, asks
        self.contexts = [list(ask.context) for ask in asks]

    def draft(self, limits: np.ndarray) -> DraftTable:
        width = int(limits.max(initial=0))
        tokens, parents = np.zeros((2, len(limits), width), np.int32)
        counts = np.zeros(len(limits), np.int32)
        for row, (ask, context) in enumerate(zip(self.asks, self.contexts, strict=True)):
            if not limits[row]:
                continue
            tree = self.drafter.propose(replace(ask, context=context, max_tokens=int(limits[row])))
            counts[row] = len(tree.tokens)
            tokens[row, : counts[row]] = tree.tokens
            parents[row, : counts[row]] = [-1 if parent is None else parent for parent in tree.parents]
        return DraftTable(tokens, parents, counts)

    def observe(self, tokens: np.ndarray, offsets: np.ndarray) -> None:
        for row, (ask, context) in enumerate(zip(self.asks, self.contexts, strict=True)):
            new = tokens[offsets[row] : offsets[row + 1]].tolist()
            self.drafter.observe(ask.group, ask.request, new, start=len(context) - ask.num_prompt_tokens)
            context.extend(new)

    def close(self, tried: Sequence[int], taken: Sequence[int]) -> None:
        assert all(0 <= hits <= count for count, hits in zip(tried, taken, strict=True)), (tried, taken)


def knowing(future: Mapping[int, Sequence[int]], seed: int = 0, *, tree: bool, errors: float = 0.3) -> FunctionDrafter:
    """A drafter that knows the tokens to come, with deliberate errors so that every kind of walk happens."""
    dice = random.Random(seed)

    def propose(ask: DraftAsk) -> DraftTree:
        known = list(future[ask.request])
        at = len(ask.context) - ask.num_prompt_tokens
        tokens: list[int] = []
        parents: list[int | None] = []
        parent: int | None = None
        for token in known[at : at + ask.max_tokens]:
            if len(tokens) >= ask.max_tokens:
                break
            wrong = (token + 1 + dice.randrange(90)) % 128
            if tree and len(tokens) + 1 < ask.max_tokens and dice.random() < 0.6:
                tokens.append(wrong)  # a wrong sibling, sometimes with a child of its own
                parents.append(parent)
                if len(tokens) + 1 < ask.max_tokens and dice.random() < 0.5:
                    tokens.append(token)
                    parents.append(len(tokens) - 2)
            tokens.append(wrong if dice.random() < errors and not tree else token)
            parents.append(parent)
            parent = len(tokens) - 1
        return DraftTree(tokens, parents)

    return FunctionDrafter(propose)


def random_trees(seed: int, vocab: int) -> FunctionDrafter:
    """A drafter that knows nothing: random trees of random tokens."""
    dice = random.Random(seed)

    def propose(ask: DraftAsk) -> DraftTree:
        size = dice.randint(0, ask.max_tokens)
        tokens: list[int] = []
        parents: list[int | None] = []
        taken: set[tuple[int | None, int]] = set()
        for _ in range(size):
            parent = dice.choice([None, *range(len(tokens))])
            token = dice.randrange(vocab)
            if (parent, token) not in taken:
                taken.add((parent, token))
                tokens.append(token)
                parents.append(parent)
        return DraftTree(tokens, parents)

    return FunctionDrafter(propose)


def always(max_tokens: int, max_paths: int = 1) -> DraftBudget:
    return lambda batch: Allowance(max_tokens, max_paths)
