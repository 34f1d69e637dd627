# SPDX-License-Identifier: Apache-2.0
"""Conversations with a slow tool and scarce KV memory: KV parked in the pool, recomputed, or held.

    python benchmarks/rollout/conversations.py [--conversations 48] [--repeat 3] [--out FILE.json]
    python benchmarks/rollout/conversations.py --model DIR --engine vllm --device cuda ...

With --model a real model answers questions with the Python tool. Without it the weights are random: their tokens mean
nothing, their cost is real. One instance, whose KV memory holds a few conversations. A tool answers after a time drawn
from its range. Three ways, interleaved and repeated:

    park        Seer: while a tool works its conversation holds nothing on the instance; its KV rests in the pool
    recompute   no pool: what other conversations have pushed out is computed again
    hold N      a conversation keeps its place and its KV until it ends, so only as many run at once as fit in memory;
                the better number is the best of --held. It may have fewer conversations (--held-conversations), several
                times N: tokens/s hardly depend on how many follow each other

Seconds are from the first submission to the last end; of these the instance spends `step_s` in steps and `load_s` on KV
from the pool between them. Tokens are equal in all ways on the embedded engine, which is asserted. On vLLM sums round
differently from batch to batch, so conversations differ in length by chance: compare tokens per second there. Runs that
would not fit into --limit-s are left out and named.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import json
import statistics
import sys
import tempfile
import time
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
sys.path[:0] = [str(ROOT / "src"), str(ROOT / "benchmarks")]

from conversation_worlds import END_TOKEN, VOCABULARY, PriceList, RandomWorld

from seer import FinishReason, HostingConfig, Response, Rollout
from seer.engine.local.tiny import make_tiny_model
from seer.metrics.events import Event, Prefilling, Stepped
from stamp import print_stamp
from turns import await_turn

BLOCK_SIZE = 16
World = RandomWorld | PriceList


class Counts:
    """What the instance computed."""

    def __init__(self) -> None:
        self.num_prefilled = self.num_recomputed = self.num_steps = 0
        self.step_s = self.load_s = 0.0

    def __call__(self, event: Event) -> None:
        if isinstance(event, Prefilling):
            self.num_recomputed += event.num_recomputed
        elif isinstance(event, Stepped):
            self.num_prefilled += event.num_prefill_tokens
            self.num_steps += event.num_steps
            self.step_s += event.duration_s
            self.load_s += event.load_s


async def converse(
    rollout: Rollout, world: World, args: argparse.Namespace, held: int | None
) -> tuple[dict[str, Any], list[Any]]:
    """All conversations through one session; with `held`, at most so many at once."""
    num = args.held_conversations if held and args.held_conversations else args.conversations
    counts, places = Counts(), asyncio.Semaphore(held or num)

    async def one(number: int) -> Response:
        async with places:
            [handle] = session.submit(
                world.prompt(number), sampling=world.sampling, seed=number, environment=world, tools=world.tools
            )
            return await handle

    async with rollout.session(events=counts, speculation=args.speculation) as session:
        began_s = time.perf_counter()
        responses = await asyncio.gather(*(one(number) for number in range(num)))
        seconds = time.perf_counter() - began_s
    failed = [response.error for response in responses if response.finish_reason is FinishReason.FAILED]
    assert not failed, f"{len(failed)} conversations failed: {failed[0]}"
    return _numbers(responses, counts, seconds), [response.token_ids for response in responses]


def _numbers(responses: list[Response], counts: Counts, seconds: float) -> dict[str, Any]:
    context = sum(response.num_prompt_tokens + response.num_given_tokens for response in responses)
    generated = sum(sum(response.loss_mask) for response in responses)
    return {
        "seconds": round(seconds, 2),
        "tokens_s": round(generated / seconds, 1),
        "generated": generated,
        "prompt_and_given": context,
        "recomputed_share": round(counts.num_recomputed / context, 4),
        "prefilled": counts.num_prefilled,
        "steps": counts.num_steps,
        "step_s": round(counts.step_s, 2),
        "load_s": round(counts.load_s, 2),
        "turns": sum(turn.kind == "generated" for response in responses for turn in response.turns),
        "reward": round(statistics.mean(response.reward or 0.0 for response in responses), 3),
    }


def a_rollout(model: Path, args: argparse.Namespace, pool_bytes: int) -> Rollout:
    settings: dict[str, Any] = json.loads(args.engine_settings)
    if args.engine == "vllm" and args.device != "cpu":
        # KV memory is given in blocks. This is only the share of the GPU that must be free at the start.
        settings.setdefault("engine", {"gpu_memory_utilization": 0.1})
    return Rollout(
        model,
        engine=args.engine,
        device=args.device,
        share_gpus=args.device != "cpu",
        instances=1,
        kv_blocks=args.kv_tokens // BLOCK_SIZE,
        block_size=BLOCK_SIZE,
        max_num_seqs=args.max_num_seqs,
        max_model_len=args.max_model_len,
        pool_bytes=pool_bytes,
        hosting=HostingConfig(pin_cores=False if args.device != "cpu" else None, start_deadline_s=400.0),
        engine_settings=settings,
    )


@contextlib.asynccontextmanager
async def both(model: Path, args: argparse.Namespace) -> AsyncIterator[tuple[Rollout, Rollout]]:
    """One instance with a pool and one without; the one that is not measured is idle."""
    pooled, plain = a_rollout(model, args, args.pool_bytes), a_rollout(model, args, 0)
    async with contextlib.AsyncExitStack() as started:
        await asyncio.gather(*(started.enter_async_context(one) for one in (pooled, plain)))
        yield pooled, plain


async def run(args: argparse.Namespace, model: Path, world: World) -> list[dict[str, Any]]:
    """Every way, `repeat` times in turn."""
    runs: list[dict[str, Any]] = []
    expected: list[Any] | None = None
    began_s, longest_s = time.monotonic(), {}
    async with both(model, args) as (pooled, plain):
        print(f"both instances are up after {time.monotonic() - began_s:.0f} s", flush=True)
        await asyncio.to_thread(await_turn, args.go, args.limit_s)
        ways = [("park", pooled, None), ("recompute", plain, None)]
        ways += [(f"hold {held}", plain, held) for held in args.held]
        for repeat in range(args.repeat):
            for way, rollout, held in ways if repeat >= args.repeat - args.repeat_held else ways[:2]:
                if time.monotonic() - began_s + longest_s.get(way, 0.0) > args.limit_s:
                    print(f"left out for lack of time: {way}, repeat {repeat}", flush=True)
                    continue
                await rollout.update_weights(model)  # so that no run finds KV of the one before it
                numbers, tokens = await converse(rollout, world, args, held)
                longest_s[way] = numbers["seconds"]
                expected = expected or tokens
                assert args.engine == "vllm" or tokens == expected[: len(tokens)], f"{way} gave other tokens"
                runs.append({"way": way, "repeat": repeat, **numbers})
                print(runs[-1], flush=True)
                if args.out is not None:
                    args.out.write_text(json.dumps(runs, indent=1))
    return runs


def medians(runs: list[dict[str, Any]]) -> dict[str, dict[str, float]]:
    """By way: the medians of its runs."""
    found: dict[str, dict[str, float]] = {}
    for way in dict.fromkeys(one["way"] for one in runs):
        mine = [one for one in runs if one["way"] == way]
        found[way] = {
            name: statistics.median(one[name] for one in mine) for name in ("seconds", "tokens_s", "recomputed_share")
        }
    return found


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", type=Path, help="folder of a model with a chat template; none: random weights")
    parser.add_argument("--engine", default="local", choices=("vllm", "local"))
    parser.add_argument("--device", default="cpu")
    for name, default, meaning in (
        ("conversations", 48, "in one run"), ("turns", 4, "most turns of the model in a conversation"),
        ("prompt", 256, "tokens of a prompt, about"), ("given", 192, "tokens of an answer (random weights)"),
        ("generated", 64, "tokens of a turn; their product with --turns is the conversation's limit"),
        ("rarity", 16, "one of so many tokens ends a turn (random weights)"),
        ("kv-tokens", 4096, "KV memory of the instance"), ("max-num-seqs", 16, "requests that it runs at once"),
        ("max-model-len", 8192, "longest context"), ("pool-bytes", 1 << 30, "the pool of `park`"),
        ("max-processes", 16, "Python tools that run at once"),
        ("width", 256, "of random weights"), ("layers", 6, "of random weights"), ("repeat", 3, "runs of each way"),
        ("repeat-held", 3, "the last so many times, with hold"),
        ("held-conversations", 0, "conversations of one run of hold; 0: all"),
    ):  # fmt: skip
        parser.add_argument(f"--{name}", type=int, default=default, help=f"{meaning} ({default})")
    parser.add_argument("--tool-s", type=float, nargs=2, default=[0.2, 1.0], metavar=("FROM", "TO"))
    parser.add_argument("--held", type=int, nargs="*", default=[3, 4, 6])
    parser.add_argument("--temperature", type=float, default=0.7, help="of a real model (0.7)")
    parser.add_argument("--speculation", default="off", choices=("auto", "off"))
    parser.add_argument("--engine-settings", default="{}", help="JSON, handed to the engine")
    parser.add_argument("--go", type=Path, help="instances start, and conversations begin when this file is there")
    parser.add_argument("--limit-s", type=float, default=3600.0)
    parser.add_argument("--out", type=Path)
    return parser.parse_args()


def main() -> None:
    """Run and print medians."""
    args = parse()
    stamp = print_stamp(args)
    world = RandomWorld(args) if args.model is None else PriceList(args)
    with tempfile.TemporaryDirectory() as folder:
        model = args.model or make_tiny_model(
            Path(folder), vocab_size=VOCABULARY, hidden_size=args.width, intermediate_size=2 * args.width,
            num_hidden_layers=args.layers, head_dim=args.width // 4, max_position_embeddings=8192,
            eos_token_id=END_TOKEN,
        )  # fmt: skip
        runs = asyncio.run(run(args, model, world))
    found = medians(runs)
    for way, numbers in found.items():
        print(f"{way:<12}", "  ".join(f"{name} {value:,.4g}" for name, value in numbers.items()))
    rest = [numbers["tokens_s"] for way, numbers in found.items() if way != "park"]
    if rest and "park" in found:
        print(f"park over the better of the others: {found['park']['tokens_s'] / max(rest):.2f}x in tokens/s")
    if args.out is not None:
        settings = {key: str(value) for key, value in vars(args).items()}
        args.out.write_text(
            json.dumps({"stamp": stamp, "settings": settings, "runs": runs, "medians": found}, indent=1)
        )


if __name__ == "__main__":
    main()
