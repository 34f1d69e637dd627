# SPDX-License-Identifier: Apache-2.0
"""The KV pool against memory, disk and its peers, in one run on one machine.

    python benchmarks/pool/run.py [--rounds 7] [--lmcache-venv FOLDER] [--skip mooncake lmcache ssd] [--out FOLDER]

Writes results.json and results.md beside this script, or to --out. LMCache gets its own virtual environment, made on
first use and kept in a cache folder, because it brings its own torch and dozens of packages.
"""

from __future__ import annotations

import argparse
import ctypes
import functools
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import msgspec
import numpy as np

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from seer.cli.bench_pool import measure_local, measure_mooncake
from seer.kvpool.bench import PoolSpeed, Spread, copy_blocks, fresh_name, in_turns
from seer.kvpool.local import LocalPool
from seer.kvpool.local_files import LocalPoolConfig
from seer.kvpool.mooncake_servers import MooncakeServers, MooncakeServersConfig
from stamp import as_text, print_stamp

HERE = Path(__file__).parent
SIZES = (256 << 10, 1 << 20, 4 << 20)
ROUND_BYTES = 256 << 20
BATCH = 16
CALL_BYTES = 16 << 20
LMCACHE = "0.5.6"
TORCH = "2.13.0"
GIB = 1 << 30


def mooncake_bare(block_bytes: int, num_rounds: int) -> dict[str, Any]:
    """Mooncake alone, at its best: batches from and to its own registered shared memory, without our code."""
    from mooncake.store import MooncakeDistributedStore

    num_blocks = ROUND_BYTES // block_bytes
    os.environ.setdefault("MC_LOG_LEVEL", "ERROR")
    with MooncakeServers(MooncakeServersConfig(dram_bytes=3 * ROUND_BYTES)) as servers:
        store = MooncakeDistributedStore()
        assert store.setup_dummy(2 * ROUND_BYTES + (64 << 20), 64 << 20, servers.owner_address) == 0
        pointer = store.alloc_from_mem_pool(2 * ROUND_BYTES)
        assert store.register_buffer(pointer, 2 * ROUND_BYTES) == 0
        memory = np.frombuffer((ctypes.c_uint8 * (2 * ROUND_BYTES)).from_address(pointer), np.uint8)
        source = memory[:ROUND_BYTES].reshape(num_blocks, block_bytes)
        target = memory[ROUND_BYTES:].reshape(num_blocks, block_bytes)
        source[:] = np.random.default_rng(0).integers(0, 256, source.shape, dtype=np.uint8)
        private, scratch = source.copy(), np.ones_like(source)
        rates: dict[str, list[float]] = {}
        lookups = []
        for number in range(num_rounds + 1):
            names = [f"{number:016x}/{i}" for i in range(num_blocks)]
            for what, call, rows, good in (
                ("put", store.batch_put_from, source, 0),
                ("get", store.batch_get_into, target, block_bytes),
            ):

                def move(part: slice, call: Any = call, rows: Any = rows, good: int = good) -> None:
                    pointers = [int(row.ctypes.data) for row in rows[part]]
                    answers = call(names[part], pointers, [block_bytes] * len(pointers))  # noqa: B023
                    assert answers == [good] * len(pointers)

                move_s, copy_s = in_turns(
                    num_blocks, batch_of(block_bytes), move, lambda part: copy_blocks(scratch[part], private[part])
                )
                if number:
                    note_rates(rates, what, move_s, copy_s)
            assert np.array_equal(source, target)
            target[:] = 0
            few = [names[i % num_blocks] for i in range(256)]
            start = time.perf_counter()
            assert store.batch_is_exist(few) == [1] * 256
            lookups.append(time.perf_counter() - start)
            store.remove_all(True)
        store.close()
    spreads = {name: msgspec.to_builtins(Spread.of(values)) for name, values in rates.items()}
    return {"backend": "mooncake (bare, from its own memory)", "lookup_s": statistics.median(lookups[1:]), **spreads}


def batch_of(block_bytes: int) -> int:
    """Blocks per call."""
    return min(BATCH, CALL_BYTES // block_bytes)


def note_rates(rates: dict[str, list[float]], what: str, move_s: float, copy_s: float) -> None:
    """Add the rates of one round of puts or gets, and of the plain copies made in turns with them."""
    rates.setdefault(f"{what}_bytes_s", []).append(ROUND_BYTES / move_s)
    rates.setdefault("memcpy_bytes_s", []).append(ROUND_BYTES / copy_s)
    rates.setdefault(f"{what}_to_memcpy", []).append(copy_s / move_s)


def lmcache(block_bytes: int, num_rounds: int, venv: Path) -> dict[str, Any]:
    """LMCache's local backend with one and with all threads; the faster of the two counts."""
    best: dict[str, Any] = {}
    for threads in (1, os.cpu_count() or 1):
        command = [venv / "bin/python", HERE / "lmcache_peer.py", block_bytes, ROUND_BYTES, num_rounds]
        done = subprocess.run(
            list(map(str, command)),
            capture_output=True,
            text=True,
            timeout=300,
            check=True,
            # Threads that spin while they wait make torch far slower on a busy machine.
            env={**os.environ, "OMP_NUM_THREADS": str(threads), "OMP_WAIT_POLICY": "passive"},
        )
        line = next(line for line in done.stdout.splitlines() if line.startswith("RESULT "))
        result = json.loads(line.removeprefix("RESULT "))
        if not best or result["get_to_memcpy"]["median"] > best["get_to_memcpy"]["median"]:
            best = result
    return best


def lmcache_venv(folder: Path) -> Path:
    """The environment of LMCache, made if it does not exist."""
    if not (folder / "bin/python").exists():
        subprocess.run([sys.executable, "-m", "venv", str(folder)], check=True)
        pip = [str(folder / "bin/pip"), "install", "-q"]
        subprocess.run([*pip, f"torch=={TORCH}"], check=True)
        subprocess.run([*pip, f"lmcache=={LMCACHE}"], check=True)
    return folder


def ssd_tier(folder: str, block_bytes: int, num_rounds: int) -> list[dict[str, Any]]:
    """The SSD tier against the disk: the same blocks through the pool and by plain pread and pwrite."""
    num_blocks = ROUND_BYTES // block_bytes
    rows: list[dict[str, Any]] = []
    rates: dict[str, list[float]] = {}
    source = np.random.default_rng(0).integers(0, 256, (num_blocks, block_bytes), dtype=np.uint8)
    target = np.ones_like(source)
    keys = np.random.default_rng(1).integers(0, 256, (num_blocks, 32), dtype=np.uint8)
    config = LocalPoolConfig(
        name=fresh_name(),
        block_bytes=block_bytes,
        dram_bytes=ROUND_BYTES,
        ssd_bytes=2 * ROUND_BYTES,
        ssd_dir=folder,
        promote=False,
        keeper=False,
    )

    def timed(name: str, start: float) -> None:
        rates.setdefault(name, []).append(ROUND_BYTES / (time.perf_counter() - start))

    plain = os.open(os.path.join(folder, "plain"), os.O_RDWR | os.O_CREAT, 0o600)
    os.posix_fallocate(plain, 0, ROUND_BYTES)
    for number in range(num_rounds + 1):
        with LocalPool(config) as pool:
            slab = os.open(pool._files.slab(), os.O_RDWR)
            start = time.perf_counter()
            for i in range(num_blocks):
                os.pwrite(plain, source[i], i * block_bytes)
            timed("disk write, buffered", start)
            os.fdatasync(plain)
            assert all(pool.put_now(keys, source))
            arena = pool._open_arena()
            start = time.perf_counter()
            while arena.spill(BATCH, False):
                pass
            timed("pool spill", start)
            os.fdatasync(slab)
            for state in ("warm", "cold"):
                if state == "cold":
                    for file in (plain, slab):
                        os.posix_fadvise(file, 0, 0, os.POSIX_FADV_DONTNEED)
                start = time.perf_counter()
                for i in range(num_blocks):
                    os.preadv(plain, [target[i]], i * block_bytes)
                timed(f"disk read, {state}", start)
                target[:] = 0
                start = time.perf_counter()
                for at in range(0, num_blocks, BATCH):
                    assert all(pool.get_now(keys[at : at + BATCH], target[at : at + BATCH]))
                timed(f"pool get from SSD, {state}", start)
                assert np.array_equal(target, source)
            os.close(slab)
            pool.close(remove=True)
        if number == 0:
            rates.clear()
    os.close(plain)
    os.unlink(os.path.join(folder, "plain"))
    for name, values in rates.items():
        rows.append({"what": name, "block_bytes": block_bytes, **msgspec.to_builtins(Spread.of(values))})
    return rows


def four_times_dram(folder: str) -> dict[str, Any]:
    """A working set of four times the DRAM tier: everything is put, read back three times, and compared."""
    block_bytes, num_dram = 1 << 20, 128
    num_blocks = 4 * num_dram
    config = LocalPoolConfig(
        name=fresh_name(),
        block_bytes=block_bytes,
        dram_bytes=num_dram * block_bytes,
        ssd_bytes=num_blocks * block_bytes,
        ssd_dir=folder,
    )
    rng = np.random.default_rng(2)
    source = rng.integers(0, 256, (num_blocks, block_bytes), dtype=np.uint8)
    keys = rng.integers(0, 256, (num_blocks, 32), dtype=np.uint8)
    target = np.zeros_like(source)
    with LocalPool(config) as pool:
        start = time.perf_counter()
        stored = sum(sum(pool.put_now(keys[i : i + 16], source[i : i + 16])) for i in range(0, num_blocks, 16))
        put_s = time.perf_counter() - start
        right = 0
        start = time.perf_counter()
        for _ in range(3):
            target[:] = 0
            for i in range(0, num_blocks, 16):
                pool.get_now(keys[i : i + 16], target[i : i + 16])
            right += sum(bool(np.array_equal(a, b)) for a, b in zip(source, target, strict=True))
        get_s = time.perf_counter() - start
        stats = pool.stats()
        pool.close(remove=True)
    return {
        "blocks": num_blocks,
        "stored": stored,
        "reads_right": right,
        "reads": 3 * num_blocks,
        "evicted": stats.num_evicted,
        "corrupt": stats.num_corrupt,
        "spilled": stats.num_spilled,
        "hit_dram": stats.num_hit_dram,
        "hit_ssd": stats.num_hit_ssd,
        "put_bytes_s": stored * block_bytes / put_s,
        "get_bytes_s_incl_compare": 3 * num_blocks * block_bytes / get_s,
    }


def as_markdown(results: dict[str, Any]) -> str:
    def rate(spread: dict[str, float]) -> str:
        return f"{spread['median'] / GIB:.2f} ({spread['least'] / GIB:.2f}..{spread['most'] / GIB:.2f})"

    def ratio(spread: dict[str, float]) -> str:
        return f"{spread['median']:.2f} ({spread['least']:.2f}..{spread['most']:.2f})"

    lines = [
        "# The KV pool against memory, disk and peers",
        "",
        as_text(results["stamp"]),
        f"Load average before, after: {results['load']}.",
        "",
        f"GiB/s, median (least..most) of {results['rounds']} rounds of {ROUND_BYTES >> 20} MiB, in calls of at most",
        f"{BATCH} blocks and {CALL_BYTES >> 20} MiB. The time of a round is its number of calls times its median call.",
        "One process puts and another gets, except for LMCache, which cannot be shared. memcpy copies block by block,",
        "with numpy (for LMCache with torch), between private buffers, in turns with put and get. Ratios are within",
        "a round. The load of a shared machine changes from row to row, so compare backends by their ratios. Load",
        "slows Mooncake more, because its calls wait for two processes to be scheduled.",
        "",
        "| block | backend | memcpy | put | get | put / memcpy | get / memcpy | lookup of 256 |",
        "|---|---|---|---|---|---|---|---|",
    ]
    for row in results["dram"]:
        both = [ratio(row[k]) if k in row else "" for k in ("put_to_memcpy", "get_to_memcpy")]
        lookup = row["lookup_s"]["median"] if isinstance(row["lookup_s"], dict) else row["lookup_s"]
        cells = [
            f"{row['block_bytes'] >> 10} KiB",
            row["backend"],
            *(rate(row[k]) for k in ("memcpy_bytes_s", "put_bytes_s", "get_bytes_s")),
            *both,
            f"{lookup * 1e6:.0f} us",
        ]
        lines.append(f"| {' | '.join(cells)} |")
    if results["ssd"]:
        lines += ["", "## SSD tier", "", "| block | what | GiB/s |", "|---|---|---|"]
        lines += [f"| {r['block_bytes'] >> 10} KiB | {r['what']} | {rate(r)} |" for r in results["ssd"]]
        four = results["four_times_dram"]
        lines += [
            "",
            f"Working set of four times DRAM, {four['blocks']} blocks of 1 MiB: {four['stored']} stored, "
            f"{four['reads_right']} of {four['reads']} reads right,",
            f"{four['evicted']} evicted, {four['corrupt']} corrupt; {four['hit_dram']} hits in DRAM, "
            f"{four['hit_ssd']} on SSD; put {four['put_bytes_s'] / GIB:.2f} GiB/s,",
            f"get and compare {four['get_bytes_s_incl_compare'] / GIB:.2f} GiB/s.",
        ]
    return "\n".join(lines) + "\n"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--lmcache-venv", type=Path, default=Path.home() / ".cache/seer-bench/lmcache")
    parser.add_argument("--skip", nargs="*", default=[], choices=["mooncake", "lmcache", "ssd"])
    parser.add_argument("--ssd-dir", help="folder on the disk to measure; the temporary folder by default")
    parser.add_argument("--out", type=Path, default=HERE)
    args = parser.parse_args()
    load_before = os.getloadavg()[0]
    peers_versions = {} if "lmcache" in args.skip else {"lmcache": LMCACHE}
    results: dict[str, Any] = {
        "stamp": print_stamp(args, **peers_versions),
        "rounds": args.rounds,
        "dram": [],
        "ssd": [],
    }
    peers: list[Any] = [functools.partial(_ours, measure_local)]
    if "mooncake" not in args.skip:
        peers += [functools.partial(_ours, measure_mooncake), mooncake_bare]
    if "lmcache" not in args.skip:
        peers.append(functools.partial(lmcache, venv=lmcache_venv(args.lmcache_venv)))
    for block_bytes in SIZES:
        for measure in peers:
            row = {
                "block_bytes": block_bytes,
                "load": os.getloadavg()[0],
                **measure(block_bytes, args.rounds),
            }
            results["dram"].append(row)
            print(json.dumps(row), flush=True)
    if "ssd" not in args.skip:
        with tempfile.TemporaryDirectory(dir=args.ssd_dir) as folder:
            for block_bytes in SIZES:
                results["ssd"] += ssd_tier(folder, block_bytes, min(args.rounds, 5))
            results["four_times_dram"] = four_times_dram(folder)
    results["load"] = f"{load_before:.1f}, {os.getloadavg()[0]:.1f}"
    args.out.mkdir(parents=True, exist_ok=True)
    (args.out / "results.json").write_text(json.dumps(results, indent=1) + "\n")
    (args.out / "results.md").write_text(as_markdown(results))
    print((args.out / "results.md").read_text())


def _ours(measure: Any, block_bytes: int, num_rounds: int) -> dict[str, Any]:
    speed: PoolSpeed = measure(block_bytes, ROUND_BYTES, batch_of(block_bytes), num_rounds)
    row: dict[str, Any] = msgspec.to_builtins(speed)
    return row


if __name__ == "__main__":
    main()
