# SPDX-License-Identifier: Apache-2.0
"""Conversations with a slow tool on a CPU, with scarce KV memory: KV parked in the pool, recomputed, or held.

    python benchmarks/rollout/conversations.py [--conversations 48] [--repeat 3] [--out FILE.json]

A model of random weights (its tokens mean nothing, its cost is real), one instance whose KV memory holds a few
conversations. Each conversation has the same turns: the model generates, a tool answers after a time drawn from its
range. Three ways, interleaved and repeated, with equal tokens:

    park        Seer: while a tool works its conversation holds nothing on the instance; its KV rests in the pool
    recompute   no pool: what other conversations have pushed out is computed again
    hold        a conversation keeps its place and its KV until it ends, so only as many run at once as fit in memory;
                the number is the best of --held

Seconds are from the first submission to the last end.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import random
import statistics
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from seer import Conversation, End, Reply, Response, Rollout, Sampling
from seer.engine.local.tiny import make_tiny_model
from seer.environments.base import Answer
from seer.metrics.events import Event, Prefilling, Stepped
from stamp import print_stamp

VOCABULARY, END_TOKEN = 512, 2


class Tool:
    """Answers with tokens after a while; both are functions of the conversation and the turn."""

    def __init__(self, args: argparse.Namespace) -> None:
        self._args = args

    async def __call__(self, conversation: Conversation) -> Answer:
        args = self._args
        dice = random.Random(f"{conversation.prompt_token_ids} {conversation.turn}")
        await asyncio.sleep(dice.uniform(*args.tool_s))
        if conversation.turn == args.turns:
            return End(reward=1.0)
        return Reply(token_ids=[dice.randrange(3, VOCABULARY) for _ in range(args.given)])


class Counts:
    """What the instance computed."""

    def __init__(self) -> None:
        self.num_prefilled = self.num_recomputed = 0

    def __call__(self, event: Event) -> None:
        if isinstance(event, Prefilling):
            self.num_recomputed += event.num_recomputed
        elif isinstance(event, Stepped):
            self.num_prefilled += event.num_prefill_tokens


async def converse(rollout: Rollout, args: argparse.Namespace, held: int | None) -> tuple[dict[str, Any], list[Any]]:
    """All conversations through one session; with `held`, at most so many at once."""
    tool, counts, places = Tool(args), Counts(), asyncio.Semaphore(held or args.conversations)
    # Turns end after a number of tokens, not by what random weights say: each is a whole lease of the sampling's limit.
    sampling = Sampling(max_tokens=args.turns * args.generated, stop_token_ids=tuple(range(3, VOCABULARY, args.rarity)))

    async def one(number: int) -> Response:
        dice = random.Random(number)
        prompt = [dice.randrange(3, VOCABULARY) for _ in range(args.prompt)]
        async with places:
            [handle] = session.submit(prompt, sampling=sampling, seed=number, environment=tool)
            return await handle

    async with rollout.session(events=counts, speculation="off") as session:
        began_s = time.perf_counter()
        responses = await asyncio.gather(*(one(number) for number in range(args.conversations)))
        seconds = time.perf_counter() - began_s
    assert all(response.is_complete for response in responses), "a conversation did not end by itself"
    context = sum(response.num_prompt_tokens + response.num_given_tokens for response in responses)
    numbers = {
        "seconds": round(seconds, 2),
        "tokens_s": round(sum(response.num_tokens for response in responses) / seconds, 1),
        "recomputed_share": round(counts.num_recomputed / context, 4),
        "turns": sum(turn.kind == "generated" for response in responses for turn in response.turns),
    }
    return numbers, [response.token_ids for response in responses]


def a_rollout(model: Path, args: argparse.Namespace, pool_bytes: int) -> Rollout:
    return Rollout(
        model, instances=1, kv_blocks=args.kv_tokens // 16, max_num_seqs=args.max_num_seqs, pool_bytes=pool_bytes
    )


async def run(args: argparse.Namespace) -> list[dict[str, Any]]:
    """Every way, `repeat` times in turn; tokens must be equal."""
    runs: list[dict[str, Any]] = []
    expected: list[Any] | None = None
    with tempfile.TemporaryDirectory() as folder:
        model = make_tiny_model(
            Path(folder), vocab_size=VOCABULARY, hidden_size=args.width, intermediate_size=2 * args.width,
            num_hidden_layers=args.layers, max_position_embeddings=8192, eos_token_id=END_TOKEN,
        )  # fmt: skip
        async with a_rollout(model, args, 1 << 30) as pooled, a_rollout(model, args, 0) as plain:
            ways = [("park", pooled, None), ("recompute", plain, None)]
            ways += [(f"hold {held}", plain, held) for held in args.held]
            for repeat in range(args.repeat):
                for way, rollout, held in ways:
                    numbers, tokens = await converse(rollout, args, held)
                    expected = expected or tokens
                    assert tokens == expected, f"{way} gave other tokens"
                    runs.append({"way": way, "repeat": repeat, **numbers})
                    print(runs[-1], flush=True)
    return runs


def main() -> None:
    """Run and print medians."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    for name, default in (
        ("conversations", 48), ("turns", 4), ("prompt", 256), ("given", 192), ("generated", 64), ("rarity", 16),
        ("kv-tokens", 4096), ("max-num-seqs", 16), ("width", 256), ("layers", 6), ("repeat", 3),
    ):  # fmt: skip
        parser.add_argument(f"--{name}", type=int, default=default)
    parser.add_argument("--tool-s", type=float, nargs=2, default=[0.2, 1.0], metavar=("FROM", "TO"))
    parser.add_argument("--held", type=int, nargs="*", default=[3, 4, 6])
    parser.add_argument("--out", type=Path)
    args = parser.parse_args()
    stamp = print_stamp(args)
    runs = asyncio.run(run(args))
    medians = {
        way: statistics.median(one["seconds"] for one in runs if one["way"] == way)
        for way in dict.fromkeys(one["way"] for one in runs)
    }
    print("median seconds:", medians)
    if args.out is not None:
        settings = {key: value for key, value in vars(args).items() if key != "out"}
        args.out.write_text(
            json.dumps({"stamp": stamp, "settings": settings, "runs": runs, "medians": medians}, indent=1)
        )


if __name__ == "__main__":
    main()
