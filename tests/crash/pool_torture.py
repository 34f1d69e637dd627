# SPDX-License-Identifier: Apache-2.0
"""Kill processes that use the local pool, at random, and check that nothing acknowledged is lost or wrong.

    python tests/crash/pool_torture.py --kills 1000 --seed 1

Writers, readers and spillers run as processes of their own over one small pool whose DRAM tier holds a tenth
of the blocks, so bytes are always on the move. A killer ends one of them at a time with SIGKILL: half the
time at a random moment, half the time at a named point inside the native code (a few of those are inside the
lock). Each dead process is replaced.

What "acknowledged" means is written down by the writers themselves, in a file the killer cannot tear: one
counter per block, odd while the pool has acknowledged the block and nobody has begun to free it. Whoever
reads the same odd counter before and after a `get` must have got the right bytes. Readers check that all the
time, and the killer checks every block after each kill.
"""

from __future__ import annotations

import argparse
import mmap
import multiprocessing
import os
import random
import shutil
import signal
import sys
import tempfile
import time
from dataclasses import dataclass, field
from multiprocessing.process import BaseProcess
from pathlib import Path

import numpy as np

from seer.kvpool import _arena
from seer.kvpool.local import LocalPool
from seer.kvpool.local_files import LocalPoolConfig

BLOCK_BYTES = 16 << 10
NUM_BLOCKS = 240
DRAM_BLOCKS = 24
NUM_WRITERS, NUM_READERS, NUM_SPILLERS = 2, 2, 1
READY_DEADLINE_S = 60.0
# One process dies at each of these while it does its ordinary work.
POINTS = {
    "writer": ["reserved", "copied", "publishing", "published", "pinning", "freeing", "rebuilding"],
    "reader": ["reading", "promote_copied", "promote_moved"],
    "spiller": [
        "spill_claimed",
        "spill_written",
        "spill_moved",
        "promote_copied",
        "promote_moved",
        "rebuilding",
    ],
}


@dataclass
class Outcome:
    """What a run of the killer found."""

    kills: int = 0
    reads: int = 0
    kills_by_kind: dict[str, int] = field(default_factory=dict)
    repairs: int = 0
    acknowledged: int = 0
    problems: list[str] = field(default_factory=list)
    seconds: float = 0.0


def key_of(block: int) -> bytes:
    return (7).to_bytes(8, "little") + block.to_bytes(8, "little") + bytes(16)


def contents() -> np.ndarray:
    return np.random.default_rng(0).integers(0, 256, (NUM_BLOCKS, BLOCK_BYTES), dtype=np.uint8)


class Ledger:
    """Shared counters: odd while block i is acknowledged; plus reads done and mistakes seen, per process
    slot.
    """

    def __init__(self, path: str) -> None:
        with open(path, "r+b") as file:
            self._map = mmap.mmap(file.fileno(), 0)
        self.state = np.frombuffer(self._map, np.uint64, NUM_BLOCKS)
        self.reads = np.frombuffer(self._map, np.uint64, 64, NUM_BLOCKS * 8)
        self.mistakes = np.frombuffer(self._map, np.uint64, 64, (NUM_BLOCKS + 64) * 8)
        self.beats = np.frombuffer(self._map, np.uint64, 64, (NUM_BLOCKS + 128) * 8)

    @staticmethod
    def create(path: str) -> None:
        Path(path).write_bytes(bytes(8 * (NUM_BLOCKS + 192)))


def check_blocks(pool: LocalPool, ledger: Ledger, truth: np.ndarray, blocks: list[int]) -> tuple[int, list[str]]:
    """Read blocks; returns how many were acknowledged throughout, and what was wrong with them."""
    out = np.zeros((len(blocks), BLOCK_BYTES), np.uint8)
    before = ledger.state[blocks].copy()
    hits = pool.get_now([key_of(b) for b in blocks], out)
    after = ledger.state[blocks]
    checked, wrong = 0, []
    for i, block in enumerate(blocks):
        if hits[i] and not np.array_equal(out[i], truth[block]):
            wrong.append(f"block {block} has wrong bytes")
        if before[i] % 2 == 1 and before[i] == after[i]:
            checked += 1
            if not hits[i]:
                wrong.append(f"acknowledged block {block} is gone")
    return checked, wrong


def write(pool: LocalPool, ledger: Ledger, truth: np.ndarray, rng: random.Random, slot: int) -> None:
    """Put and free the blocks of this writer, a request (of eight blocks) at a time."""
    requests = [r for r in range(NUM_BLOCKS // 8) if r % NUM_WRITERS == slot]
    for r in requests:  # what a killed predecessor was doing is unknown: start from what is surely not held
        blocks = list(range(r * 8, r * 8 + 8))
        if not all(ledger.state[blocks] % 2 == 1):
            ledger.state[blocks] += ledger.state[blocks] % 2
    while True:
        ledger.beats[slot] += 1
        r = rng.choice(requests)
        blocks = list(range(r * 8, r * 8 + 8))
        if ledger.state[blocks[0]] % 2 == 1 and rng.random() < 0.5:
            ledger.state[blocks] += np.uint64(1)  # from here on nobody may count on them
            pool.free(f"request {r}")
            continue
        if ledger.state[blocks[0]] % 2 == 1:
            continue
        done = pool.put_now([key_of(b) for b in blocks], [truth[b] for b in blocks], f"request {r}")
        if all(done):
            ledger.state[blocks] += np.uint64(1)


def read(pool: LocalPool, ledger: Ledger, truth: np.ndarray, rng: random.Random, slot: int) -> None:
    while True:
        ledger.beats[slot] += 1
        checked, wrong = check_blocks(pool, ledger, truth, rng.sample(range(NUM_BLOCKS), 16))
        ledger.reads[slot] += np.uint64(checked)
        ledger.mistakes[slot] += np.uint64(len(wrong))


def spill(pool: LocalPool, ledger: Ledger, truth: np.ndarray, rng: random.Random, slot: int) -> None:
    arena = pool._open_arena()
    while True:
        ledger.beats[slot] += 1
        arena.spill(rng.randint(1, 8), False)
        arena.promote(b"".join(key_of(b) for b in rng.sample(range(NUM_BLOCKS), 4)))
        arena.reap()


def child(kind: str, slot: int, config: LocalPoolConfig, ledger_path: str, seed: int, point: str | None) -> None:
    rng = random.Random(seed)
    pool = LocalPool.attach(config.name, config.dram_dir, keeper=False, populate=False)
    ledger, truth = Ledger(ledger_path), contents()
    if point:
        _arena.crash_at(point, rng.randint(0, 20))
    if point == "rebuilding":
        pool._open_arena().rebuild()
    {"writer": write, "reader": read, "spiller": spill}[kind](pool, ledger, truth, rng, slot)


def kill(victim: BaseProcess, point: str | None, kind: str, outcome: Outcome) -> None:
    """Kill a process, unless it does so itself at its point."""
    how = "anywhere"
    if point:
        victim.join(timeout=0.5)  # it may be about to reach its point by itself
        how = point
    if victim.is_alive():
        victim.kill()
        how = "anywhere"
    victim.join(timeout=READY_DEADLINE_S)
    if victim.exitcode != -signal.SIGKILL:
        outcome.problems.append(f"{kind} ended by itself with {victim.exitcode}")
    victim.close()
    outcome.kills += 1
    outcome.kills_by_kind[how] = outcome.kills_by_kind.get(how, 0) + 1


def check_at_the_end(pool: LocalPool, ledger: Ledger, truth: np.ndarray, outcome: Outcome) -> None:
    """With all users dead: what they acknowledged is there, and nothing of theirs is still claimed."""
    checked, wrong = check_blocks(pool, ledger, truth, list(range(NUM_BLOCKS)))
    pool._open_arena().reap()
    stats = pool._open_arena().stats()
    outcome.reads += checked + int(ledger.reads.sum())
    outcome.acknowledged = checked
    outcome.repairs = stats["repaired"]
    outcome.problems += wrong + pool._open_arena().problems()
    if ledger.mistakes.sum():
        outcome.problems.append(f"readers saw {int(ledger.mistakes.sum())} mistakes")
    for name in ("corrupt", "evicted"):
        if stats[name]:
            outcome.problems.append(f"{name}: {stats[name]}")
    if stats["num_claims"]:
        outcome.problems.append(f"{stats['num_claims']} claims of dead processes were not taken back")


def torture(kills: int, seed: int, folder: Path, budget_s: float) -> Outcome:
    """Kill `kills` processes, or as many as fit the time; check everything after each."""
    started = time.monotonic()
    rng = random.Random(seed)
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["numpy", "seer.kvpool.local", "pool_torture"])
    ledger_path = str(folder / "ledger")
    Ledger.create(ledger_path)
    config = LocalPoolConfig(
        block_bytes=BLOCK_BYTES,
        dram_bytes=DRAM_BLOCKS * BLOCK_BYTES,
        ssd_bytes=2 * NUM_BLOCKS * BLOCK_BYTES,  # room for all: what goes missing was lost, not evicted
        ssd_dir=str(folder),
        dram_dir=str(folder),
        name=f"torture-{os.getpid()}",
        keeper=False,
        populate=False,
    )
    pool = LocalPool(config)
    ledger, truth, outcome = Ledger(ledger_path), contents(), Outcome()
    kinds = ["writer"] * NUM_WRITERS + ["reader"] * NUM_READERS + ["spiller"] * NUM_SPILLERS
    running: list[BaseProcess] = []
    points: list[str | None] = []

    def start(slot: int) -> tuple[BaseProcess, str | None]:
        point = rng.choice(POINTS[kinds[slot]]) if rng.random() < 0.5 else None
        args = (kinds[slot], slot, config, ledger_path, rng.getrandbits(32), point)
        process = context.Process(target=child, args=args, daemon=True)
        process.start()
        return process, point

    def wait_for_beat(slot: int) -> None:
        """Until the process did some work, or died at its point."""
        seen, deadline = int(ledger.beats[slot]), time.monotonic() + READY_DEADLINE_S
        while int(ledger.beats[slot]) < seen + 3 and running[slot].is_alive():
            assert time.monotonic() < deadline, f"{kinds[slot]} {slot} did nothing for {READY_DEADLINE_S} s"
            time.sleep(0.001)

    try:
        for slot in range(len(kinds)):
            process, point = start(slot)
            running.append(process)
            points.append(point)
        while outcome.kills < kills and not outcome.problems and time.monotonic() - started < budget_s:
            slot = rng.randrange(len(kinds))
            wait_for_beat(slot)
            time.sleep(rng.random() * 0.01)  # a random moment of its work
            kill(running[slot], points[slot], kinds[slot], outcome)
            running[slot], points[slot] = start(slot)
            checked, wrong = check_blocks(pool, ledger, truth, list(range(NUM_BLOCKS)))
            outcome.reads += checked
            outcome.problems += wrong + pool._open_arena().problems()
        for process in running:
            process.kill()
            process.join(timeout=READY_DEADLINE_S)
        check_at_the_end(pool, ledger, truth, outcome)
    finally:
        for process in running:
            if process.is_alive():
                process.kill()
        pool.close(remove=True)
    outcome.seconds = time.monotonic() - started
    return outcome


def main() -> int:
    parser = argparse.ArgumentParser(description="Kill users of the local pool and check that nothing is lost.")
    parser.add_argument("--kills", type=int, default=1000)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--budget-s", type=float, default=1800.0)
    args = parser.parse_args()
    folder = Path(tempfile.mkdtemp(prefix="seer-torture-", dir="/dev/shm"))
    try:
        outcome = torture(args.kills, args.seed, folder, args.budget_s)
    finally:
        shutil.rmtree(folder, ignore_errors=True)
    print(outcome)
    return 1 if outcome.problems or outcome.kills < args.kills else 0


if __name__ == "__main__":
    sys.path.insert(0, str(Path(__file__).parent))
    import pool_torture  # children must find these functions under their own module's name

    sys.exit(pool_torture.main())
