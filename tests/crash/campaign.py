# SPDX-License-Identifier: Apache-2.0
"""The fault campaign in many processes at once, for a given time: a table of what was struck, compared and found.

    python tests/crash/campaign.py --seconds 500 --processes 8 --report folder

Each process runs the tests of one part with a seed of its own, again and again until the time is over. A part is a test
of this folder: PARTS. The report folder gets report.jsonl (the counts) and failures.log (the end of what failing tests
wrote, with the seed that replays them). The exit code is 1 if anything failed, or a part did not get through a round.

`--sum folder...` adds up the reports of earlier campaigns instead.
"""

from __future__ import annotations

import argparse
import json
import os
import secrets
import subprocess
import sys
import time
from collections import Counter
from pathlib import Path
from typing import Any

HERE = Path(__file__).parent
ROLLOUTS, REMOTE = HERE / "test_rollout_faults.py", HERE / "test_remote_faults.py"
DRIVERS, HTTP = HERE / "test_driver_faults.py", HERE / "test_http_faults.py"
HOSTING = HERE / "test_hosting_faults.py"
PARTS = {
    "local": f"{ROLLOUTS}::test_no_fault_loses_doubles_or_changes_a_token",
    "vllm": f"{ROLLOUTS}::test_no_fault_changes_a_token_of_vllm",
    "mooncake": f"{ROLLOUTS}::test_no_fault_of_mooncake_changes_a_token",
    "tcp": f"{REMOTE}::test_no_fault_of_a_connection_changes_a_token",
    "ray": f"{REMOTE}::test_no_fault_on_a_cluster_changes_a_token",
    "hosting": f"{HOSTING}::test_no_fault_of_hosting_changes_a_token",
    "http": f"{HTTP}::test_no_fault_changes_a_token_of_a_stream",
    "driver": f"{DRIVERS}::test_no_fault_of_the_driver_loses_a_token_or_leaves_anything_behind",
}
MANY_ROUNDS = 10**6
"""Time ends a campaign."""
LOG_TAIL_BYTES = 20_000
GRACE_S = 240.0
"""For a round that has begun when the time is over, and for closing."""


def command(part: str) -> list[str]:
    """pytest without the repository's settings and fixtures: only the `tests` folder has to be there."""
    plain = ["-c", os.devnull, "--rootdir", str(HERE), "--noconftest", "-p", "no:cacheprovider"]
    return [sys.executable, "-m", "pytest", "-q", "-s", *plain, PARTS[part]]


def environment(seed: int, seconds: float, report: Path) -> dict[str, str]:
    own = {
        "SEER_FAULT_SEED": str(seed),
        "SEER_FAULT_ROUNDS": str(MANY_ROUNDS),
        "SEER_FAULT_SECONDS": f"{seconds:.0f}",
        "SEER_FAULT_REPORT": str(report / "report.jsonl"),
        "ONEDNN_MAX_CPU_ISA": "AVX512_CORE_FP16",  # as tests/conftest.py
        "PYTHONPATH": os.pathsep.join([str(HERE.parent), *os.environ.get("PYTHONPATH", "").split(os.pathsep)]),
    }
    return dict(os.environ) | own


def private() -> list[str]:
    """Words before a command that give it a /dev/shm of its own; none where that is not allowed."""
    script = 'mount -t tmpfs none /dev/shm && exec "$@"'
    words = ["unshare", "--user", "--map-root-user", "--mount", "bash", "-c", script, "bash"]
    return words if subprocess.run([*words, "true"], check=False, capture_output=True).returncode == 0 else []


class Worker:
    """One process of a part after the other, until the time is over."""

    def __init__(self, part: str, seed: int, end_s: float, report: Path, log: Path) -> None:
        self.part, self.seed, self.end_s, self.report, self.log = part, seed, end_s, report, log
        self.num_failed = 0
        self.num_started = 0
        self.seeds: set[int] = set()
        self.before = private()
        self.process: subprocess.Popen[bytes] | None = None

    def step(self) -> bool:
        """See to the process; False when there is no more to do."""
        if self.process is not None and self.process.poll() is None:
            if time.monotonic() > self.end_s + GRACE_S:
                self.process.kill()
            return True
        if self.process is not None:
            self._look_at(self.process.returncode)
            self.process = None
        left_s = self.end_s - time.monotonic()
        if left_s < 20.0:
            return False
        self._start(left_s)
        return True

    def _start(self, left_s: float) -> None:
        self.seed += 1_000
        self.num_started += 1
        self.seeds.add(self.seed)
        variables = environment(self.seed, left_s, self.report)
        if self.before:
            temporary = self.log.with_suffix(f".{self.num_started}")  # short: sockets of Ray and vLLM are made in it
            temporary.mkdir()
            variables |= {"TMPDIR": str(temporary), "SEER_FAULT_PRIVATE": "1"}
        with open(self.log, "wb") as log:
            self.process = subprocess.Popen([*self.before, *command(self.part)], env=variables, stdout=log, stderr=log)

    def _look_at(self, code: int) -> None:
        if code == 0:
            return
        self.num_failed += 1
        with open(self.report / "failures.log", "ab") as failures:
            failures.write(f"\n\n===== {self.part}, SEER_FAULT_SEED={self.seed}, exit code {code}\n".encode())
            failures.write(self.log.read_bytes()[-LOG_TAIL_BYTES:])


def run(parts: list[str], num_processes: int, seconds: float, report: Path, seed: int) -> int:
    """Returns how many tests failed, and parts without a round."""
    report.mkdir(parents=True, exist_ok=True)
    logs = Path(os.environ.get("TMPDIR", "/tmp")) / f"seer-campaign-{os.getpid()}"
    logs.mkdir()
    end_s = time.monotonic() + seconds
    workers = [Worker(parts[i % len(parts)], seed + i, end_s, report, logs / f"{i}.log") for i in range(num_processes)]
    busy = list(workers)
    while busy:
        busy = [worker for worker in busy if worker.step()]
        time.sleep(0.2)
    empty = without_a_round(workers, report)
    for part in empty:
        print(f"{part} did not get through a round: is it skipped here, or too slow for the time?")
    return sum(worker.num_failed for worker in workers) + len(empty)


def without_a_round(workers: list[Worker], report: Path) -> list[str]:
    """Parts that were to run, and whose tests were skipped or never came to compare anything."""
    rounds = Counter({worker.part: 0 for worker in workers})
    for counts in _lines(report):
        rounds.update({worker.part: counts["rounds"] for worker in workers if counts["seed"] in worker.seeds})
    return [part for part, number in rounds.items() if not number]


def _lines(folder: Path) -> list[dict[str, Any]]:
    """What tests have reported; nothing where none came to it."""
    file = folder / "report.jsonl"
    return [json.loads(line) for line in file.read_text().splitlines()] if file.exists() else []


def added_up(folders: list[Path]) -> dict[str, dict[str, Any]]:
    """The last line of every test, summed by part."""
    last: dict[tuple[str, str, int], dict[str, Any]] = {}
    for folder in folders:
        for counts in _lines(folder):
            last[str(folder), counts["test"], counts["seed"]] = counts
    sums: dict[str, dict[str, Any]] = {}
    for counts in last.values():
        total = sums.setdefault(counts["test"], {"runs": 0, "strikes": Counter()})
        total["runs"] += 1
        total["strikes"].update(counts["strikes"])
        for name in ("rounds", "responses", "tokens", "differences", "leftovers", "instances_lost", "seconds"):
            total[name] = total.get(name, 0) + counts[name]
    return sums


def print_table(sums: dict[str, dict[str, Any]]) -> None:
    """Counts by part, then the strikes of each kind by part."""
    names = ("runs", "rounds", "responses", "tokens", "differences", "leftovers", "instances_lost")
    rows = {part: [total[name] for name in names] + [total["strikes"].total()] for part, total in sorted(sums.items())}
    rows["all"] = [sum(column) for column in zip(*rows.values(), strict=True)]
    _print_rows("part", (*names, "strikes"), rows)
    kinds: Counter[str] = sum((total["strikes"] for total in sums.values()), Counter())
    parts = sorted(sums)
    by_kind = {kind: [*(sums[part]["strikes"][kind] for part in parts), number] for kind, number in kinds.most_common()}
    print()
    _print_rows("strikes", (*parts, "all"), by_kind)


def _print_rows(corner: str, heads: tuple[str, ...], rows: dict[str, list[int]]) -> None:
    """A table in Markdown."""
    print("|", " | ".join((corner, *heads)), "|")
    print("|" + "---|" * (1 + len(heads)))
    for name, numbers in rows.items():
        print("|", " | ".join((name, *(f"{number:,}" for number in numbers))), "|")


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seconds", type=float, default=600.0)
    parser.add_argument("--processes", type=int, help="at least one for each part (as many as parts)")
    parser.add_argument("--parts", nargs="+", choices=PARTS, default=list(PARTS))
    parser.add_argument("--seed", type=int, default=0, help="the first one; random if it is not given")
    parser.add_argument("--report", type=Path, default=Path("build/faults"))
    parser.add_argument("--sum", nargs="+", type=Path, metavar="FOLDER")
    options = parser.parse_args()
    if options.sum:
        print_table(added_up(options.sum))
        return 0
    num_processes = len(options.parts) if options.processes is None else options.processes
    if num_processes < len(options.parts):
        parser.error(f"{num_processes} processes for {len(options.parts)} parts: some would not run (--parts)")
    seed = options.seed or secrets.randbelow(10**9)
    print(f"--seed {seed} strikes in the same way again", flush=True)
    num_failed = run(options.parts, num_processes, options.seconds, options.report, seed)
    print_table(added_up([options.report]))
    print(f"{num_failed} tests or parts failed")
    return 1 if num_failed else 0


if __name__ == "__main__":
    sys.exit(main())
