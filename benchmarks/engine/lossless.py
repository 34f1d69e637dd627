# SPDX-License-Identifier: Apache-2.0
"""Losslessness on a real model, token by token: batching, drafts and migration against plain decoding.

    python benchmarks/engine/lossless.py [--model smollm2] [--requests 16] [--tokens 160]

Plain decoding is each request alone, one token at a time. Half of the requests are greedy, half are sampled at
temperature 1. Tokens and log-probabilities are compared, the latter bit by bit. A near-tie is a sample whose second
choice was within 1e-3.
"""

from __future__ import annotations

import argparse
import random
import sys
import tempfile
import time
import uuid
from collections.abc import Sequence
from pathlib import Path

import torch

ROOT = Path(__file__).resolve().parents[2]
sys.path[:0] = [str(ROOT / "src"), str(ROOT / "tests"), str(ROOT / "benchmarks")]

from engines import Generated, a_chunk, always, an_engine, generate, knowing, tokens_of
from seer.drafting.grouped_drafter import GroupedDrafter
from seer.engine.local.cache import block_bytes
from seer.engine.local.model_config import read_config
from seer.engine.local.models_get import get_model
from seer.engine.local.tokenizer import Tokenizer
from seer.kvpool.local import LocalPool
from seer.kvpool.local_files import LocalPoolConfig
from seer.types import Chunk, TokenSpan
from stamp import print_stamp

QUESTIONS = ("How do tides work?", "Add 17 and 26, step by step.", "Name three rivers.", "Write a haiku about rain.")


def report(name: str, answers: dict[int, Generated], plain: dict[int, Generated], wall_s: float) -> int:
    compared = sum(len(answer.ids) for answer in answers.values())
    differing = sum(x != y for r in answers for x, y in zip(answers[r].ids, plain[r].ids, strict=True))
    bits = all(
        answers[r].logprobs == plain[r].logprobs and answers[r].raw_logprobs == plain[r].raw_logprobs for r in answers
    )
    drafted, accepted = (sum(getattr(a, f) for a in answers.values()) for f in ("num_drafted", "num_accepted"))
    print(
        f"{name:<34}{compared:7d} tokens  {differing} differ  log-probabilities {'equal' if bits else 'DIFFER'}"
        f"  drafted {drafted} accepted {accepted}  {wall_s:.0f} s",
        flush=True,
    )
    return compared


def main() -> int:  # noqa: PLR0915 - one experiment, in order
    options = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    options.add_argument("--model", default="smollm2")
    options.add_argument("--requests", type=int, default=16)
    options.add_argument("--tokens", type=int, default=160)
    args = options.parse_args()
    print_stamp(args)
    folder = get_model(args.model)
    tokenizer = Tokenizer(folder)
    prompts = [
        tokenizer.chat([{"role": "user", "content": QUESTIONS[i % len(QUESTIONS)]}]) for i in range(args.requests)
    ]

    def chunk(i: int, max_tokens: int, spans: Sequence[TokenSpan] = ()) -> Chunk:
        # Half of every group is greedy, so that siblings agree and drafts are accepted.
        hot = float(i // len(QUESTIONS) % 2)
        return a_chunk(
            i, prompts[i], max_tokens=max_tokens, spans=tuple(spans), group=i % len(QUESTIONS), temperature=hot
        )

    everyone = range(args.requests)
    blocks = args.requests * (args.tokens + 120) // 16
    shape = {"block_size": 16, "kv_blocks": blocks, "max_num_seqs": args.requests}
    started = time.perf_counter()
    plain: dict[int, Generated] = {}
    alone = an_engine(folder, block_size=16, kv_blocks=64, max_num_seqs=1)
    for i in everyone:
        plain |= generate(alone, [chunk(i, args.tokens)])
    total = sum(len(answer.ids) for answer in plain.values())
    print(
        f"plain decoding: {total} tokens, {alone.num_near_ties} near-ties, {time.perf_counter() - started:.0f} s",
        flush=True,
    )

    grouped = GroupedDrafter((), None)
    grouped.begin_run("lossless", "grouped", 0)
    compared = 0
    started = time.perf_counter()
    arrive = {i: 5 * i for i in everyone}
    answers = generate(an_engine(folder, **shape), [chunk(i, args.tokens) for i in everyone], arrive=arrive)
    compared += report("batch neighbours coming and going", answers, plain, time.perf_counter() - started)

    for name, changed in {
        "other block size, small pieces": {"block_size": 32, "kv_blocks": blocks, "max_step_tokens": 37},
        "three at a time": {"max_num_seqs": 3},
        "seven at a time, blocks of 8": {"max_num_seqs": 7, "block_size": 8, "kv_blocks": 2 * blocks},
    }.items():
        started = time.perf_counter()
        answers = generate(an_engine(folder, **shape | changed), [chunk(i, args.tokens) for i in everyone])
        compared += report(name, answers, plain, time.perf_counter() - started)

    for name, drafter in (
        ("linear drafts, a third wrong", knowing(tokens_of(plain), tree=False)),
        ("tree drafts", knowing(tokens_of(plain), tree=True)),
        ("grouped suffix index, 2 paths", grouped),
    ):
        started = time.perf_counter()
        engine = an_engine(folder, **shape, drafter=drafter, budget=always(6, 2))
        answers = generate(engine, [chunk(i, args.tokens) for i in everyone])
        compared += report(name, answers, plain, time.perf_counter() - started)

    started = time.perf_counter()
    size = block_bytes(read_config(folder), 16, torch.float32)
    with tempfile.TemporaryDirectory() as work:
        config = LocalPoolConfig(
            block_bytes=size,
            dram_bytes=blocks * size,
            ssd_bytes=size * 16,
            ssd_dir=work,
            dram_dir=work,
            name=uuid.uuid4().hex,
        )
        pool = LocalPool(config)
        fleet = [an_engine(folder, **shape, pool=pool) for _ in range(2)]
        dice = random.Random(1)
        spans: dict[int, list[TokenSpan]] = {i: [] for i in everyone}
        answers = {i: Generated() for i in everyone}
        while any(len(answer.ids) < args.tokens for answer in answers.values()):
            going = [i for i in everyone if len(answers[i].ids) < args.tokens]
            where = {i: dice.randrange(2) for i in going}
            for at, engine in enumerate(fleet):
                wave = [
                    chunk(i, min(dice.randint(20, 60), args.tokens - len(answers[i].ids)), spans[i])
                    for i in going
                    if where[i] == at
                ]
                for i, made in generate(engine, wave).items():
                    spans[i].append(made.span())
                    answers[i].ids += made.ids
                    answers[i].logprobs += made.logprobs
                    answers[i].raw_logprobs += made.raw_logprobs
        compared += report("chunks, migration through the pool", answers, plain, time.perf_counter() - started)
        print(f"pool: {pool.stats().num_hit_dram} blocks read back", flush=True)
        pool.close(remove=True)
    print(f"{compared} tokens compared", flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
