# SPDX-License-Identifier: Apache-2.0
"""Append rate, draft latency and memory: ours against arctic, from Python, back to back.

Both are called as an engine would call them: ours in batches, arctic request by request, because it has no batch calls.
Times include the call from Python (about 1 us per call for arctic). All times are CPU time of the calling thread: both
do all their work in it, and other processes may use the machine.
"""

import time
from collections.abc import Callable, Sequence
from types import ModuleType
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray
from streams import MEMBERS, Interleaved, interleave

from seer.drafting.index import DraftIndex, DraftOptions

DEPTHS = (24, 64)
UNCAPPED = 1000.0
COLD_GROUPS = 24
STEP_TOKENS = 3


class Timing(NamedTuple):
    what: str
    who: str
    value: float
    unit: str


def seconds(call: Callable[[], object]) -> float:
    start = time.thread_time()
    call()
    return time.thread_time() - start


def extend_all(tree: object, stream: Interleaved) -> None:
    extend = tree.extend_ndarray  # type: ignore[attr-defined]
    ends = stream.offsets.tolist()
    for item, request in enumerate(stream.requests.tolist()):
        extend(request, stream.tokens[ends[item] : ends[item + 1]])


def append_rate(module: ModuleType, name: str, members: Sequence[NDArray[np.int32]]) -> list[Timing]:
    stream = interleave(members)
    size = len(stream.tokens)
    index = DraftIndex()
    what = f"append, {name}"
    rows = [Timing(what, "ours", size / seconds(lambda: index.append(*stream)) / 1e6, "Mtok/s")]
    stats = index.stats()
    rows.append(Timing(f"memory, {name}", "ours", stats.bytes / stats.tokens, "B/token"))
    rows.append(Timing(f"drop, {name}", "ours", seconds(lambda: index.drop([0])) * 1e3, "ms"))
    for depth in DEPTHS:
        trees = [module.SuffixTree(depth)]
        rate = size / seconds(lambda trees=trees: extend_all(trees[0], stream)) / 1e6
        rows.append(Timing(what, f"arctic {depth}", rate, "Mtok/s"))
        rows.append(Timing(f"memory, {name}", f"arctic {depth}", trees[0].estimate_memory() / size, "B/token"))
        rows.append(Timing(f"drop, {name}", f"arctic {depth}", seconds(trees.clear) * 1e3, "ms"))
    return rows


class Rows:
    """Output arrays of one batch."""

    def __init__(self, size: int, budget: int) -> None:
        self.budgets = np.full(size, budget, np.int32)
        self.out = (
            np.empty((size, budget), np.int32),
            np.empty((size, budget), np.int32),
            np.empty((size, budget), np.float32),
            np.empty(size, np.int32),
        )


MODES = {"linear-8": (8, 1), "tree-8": (8, 8), "tree-32": (32, 8)}


def cold_ours(worlds: Sequence[Sequence[NDArray[np.int32]]], steps: int) -> list[Timing]:
    """24 groups of 100k tokens: each step appends 3 tokens to one member of every group and drafts for it."""
    index = DraftIndex()
    start = len(worlds[0][0]) - STEP_TOKENS * steps * len(MODES)
    for group, members in enumerate(worlds):
        for request, member in enumerate(members):
            index.append_one(group, request, member[:start])
    groups = np.arange(len(worlds), dtype=np.uint64)
    offsets = np.arange(len(worlds) + 1, dtype=np.int64) * STEP_TOKENS
    at = np.full(MEMBERS, start)
    appending: list[float] = []
    rows = []
    for mode, (budget, paths) in MODES.items():
        options = DraftOptions(paths=paths)
        buffers = Rows(len(worlds), budget)
        drafting: list[float] = []
        for step in range(steps):
            member = step % MEMBERS
            requests = np.full(len(worlds), member, np.uint64)
            done = int(at[member])
            tokens = np.concatenate([members[member][done : done + STEP_TOKENS] for members in worlds])
            previous = np.full(len(worlds), done, np.int64)
            at[member] += STEP_TOKENS
            began = time.thread_time()
            index.append(groups, requests, previous, tokens, offsets)
            middle = time.thread_time()
            index.speculate(groups, requests, buffers.budgets, *buffers.out, options=options)
            drafting.append((time.thread_time() - middle) / len(worlds))
            appending.append((middle - began) / len(worlds))
        rows.append(Timing(f"draft {mode}, cold", "ours", float(np.mean(drafting)) * 1e6, "us"))
        rows.append(Timing(f"draft {mode}, cold, p99 of steps", "ours", _p99(drafting), "us"))
    rows.append(Timing("append 3 tokens, cold", "ours", float(np.mean(appending)) * 1e6, "us"))
    return rows


def cold_arctic(
    module: ModuleType, worlds: Sequence[Sequence[NDArray[np.int32]]], depth: int, steps: int
) -> list[Timing]:
    trees = [module.SuffixTree(depth) for _ in worlds]
    start = len(worlds[0][0]) - STEP_TOKENS * steps * len(MODES)
    for tree, members in zip(trees, worlds, strict=True):
        for request, member in enumerate(members):
            tree.extend_ndarray(request, np.ascontiguousarray(member[:start]))
    at = np.full(MEMBERS, start)
    appending: list[float] = []
    rows = []
    for mode, (budget, paths) in MODES.items():
        drafting: list[float] = []
        for step in range(steps):
            member = step % MEMBERS
            done = int(at[member])
            at[member] += STEP_TOKENS
            took = [0.0, 0.0]
            for tree, members in zip(trees, worlds, strict=True):
                text = members[member]
                fresh = np.ascontiguousarray(text[done : done + STEP_TOKENS])
                end = done + STEP_TOKENS
                context = np.ascontiguousarray(text[end - depth : end])
                began = time.thread_time()
                tree.extend_ndarray(member, fresh)
                middle = time.thread_time()
                tree.speculate_ndarray(context, budget, UNCAPPED, 0.0, 0.0, paths > 1)
                took[0] += middle - began
                took[1] += time.thread_time() - middle
            appending.append(took[0] / len(worlds))
            drafting.append(took[1] / len(worlds))
        rows.append(Timing(f"draft {mode}, cold", f"arctic {depth}", float(np.mean(drafting)) * 1e6, "us"))
        rows.append(Timing(f"draft {mode}, cold, p99 of steps", f"arctic {depth}", _p99(drafting), "us"))
    rows.append(Timing("append 3 tokens, cold", f"arctic {depth}", float(np.mean(appending)) * 1e6, "us"))
    return rows


def _p99(times: Sequence[float]) -> float:
    return float(np.percentile(times, 99)) * 1e6


def batch_of_256(module: ModuleType, worlds: Sequence[Sequence[NDArray[np.int32]]], rounds: int) -> list[Timing]:
    """256 linear-8 drafts over 64 groups, four members each."""
    size = 4 * len(worlds)
    index = DraftIndex()
    for group, members in enumerate(worlds):
        for request, member in enumerate(members):
            index.append_one(group, request, member)
    groups = np.repeat(np.arange(len(worlds), dtype=np.uint64), 4)
    requests = np.tile(np.arange(4, dtype=np.uint64), len(worlds))
    rows = []
    for mode in ("linear-8", "tree-8"):
        budget, paths = MODES[mode]
        buffers, options = Rows(size, budget), DraftOptions(paths=paths)

        def ours(buffers: Rows = buffers, options: DraftOptions = options) -> None:
            index.speculate(groups, requests, buffers.budgets, *buffers.out, options=options)

        ours()
        took = float(np.median([seconds(ours) for _ in range(rounds)]))
        rows.append(Timing(f"batch of {size} {mode} from Python", "ours", took * 1e3, "ms"))
    for depth in DEPTHS:
        trees = [module.SuffixTree(depth) for _ in worlds]
        contexts = []
        for tree, members in zip(trees, worlds, strict=True):
            for request, member in enumerate(members):
                tree.extend_ndarray(request, member)
            contexts += [np.ascontiguousarray(member[-depth:]) for member in members[:4]]

        def theirs(tree_spec: bool, trees: list = trees, contexts: list = contexts) -> None:  # type: ignore[type-arg]
            for item, context in enumerate(contexts):
                trees[item // 4].speculate_ndarray(context, 8, UNCAPPED, 0.0, 0.0, tree_spec)

        for mode in ("linear-8", "tree-8"):
            tree_spec = mode == "tree-8"
            theirs(tree_spec)
            took = float(
                np.median([seconds(lambda t=tree_spec, call=theirs: call(t)) for _ in range(max(rounds // 5, 3))])
            )
            rows.append(Timing(f"batch of {size} {mode} from Python", f"arctic {depth}", took * 1e3, "ms"))
    return rows


def warm_and_rebuild(members: Sequence[NDArray[np.int32]]) -> list[Timing]:
    """Ours only: one group of a million tokens, rebuilt from its log and drafted from while hot."""
    index = DraftIndex()

    def rebuild() -> None:
        for request, member in enumerate(members):
            index.append_one(0, request, member)

    rows = [Timing("rebuild from log, 1M tokens", "ours", seconds(rebuild), "s")]
    size = 256
    groups = np.zeros(size, np.uint64)
    requests = np.tile(np.arange(MEMBERS, dtype=np.uint64), size // MEMBERS)
    for mode, (budget, paths) in MODES.items():
        buffers, options = Rows(size, budget), DraftOptions(paths=paths)

        def draft(buffers: Rows = buffers, options: DraftOptions = options) -> None:
            index.speculate(groups, requests, buffers.budgets, *buffers.out, options=options)

        took = float(np.median([seconds(draft) for _ in range(20)])) / size
        rows.append(Timing(f"draft {mode}, warm, 1M tokens", "ours", took * 1e6, "us"))
    return rows


def loops(module: ModuleType, tokens: int = 60_000) -> list[Timing]:
    """One response that repeats itself to the end."""
    rows = []
    for period in (1, 2, 3, 7, 16, 64, 250, 1000):
        loop = np.resize(np.arange(period, dtype=np.int32), tokens)
        index = DraftIndex()
        rate = tokens / seconds(lambda index=index, loop=loop: index.append_one(0, 0, loop)) / 1e6
        rows.append(Timing(f"loop of period {period}, {tokens} tokens", "ours", rate, "Mtok/s"))
    tree = module.SuffixTree(64)
    loop = np.resize(np.arange(7, dtype=np.int32), tokens)
    rate = tokens / seconds(lambda: tree.extend_ndarray(0, loop)) / 1e6
    rows.append(Timing(f"loop of period 7, {tokens} tokens", "arctic 64", rate, "Mtok/s"))
    return rows
