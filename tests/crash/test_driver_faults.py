# SPDX-License-Identifier: Apache-2.0
"""`seer rollout` while its driver is struck: killed, ended by signals, suspended, out of disk or shared memory.

After each round the run is resumed, its responses are compared token by token with those of an undisturbed run, and
nothing is left: no process, no shared memory, no lock file. A journal whose last lines were changed is refused.
"""

from __future__ import annotations

import json
import os
import random
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from commands import DEADLINE_S, a_command, assert_nothing_left, num_lines, results, shared_files, wait_until
from fault_campaign import Tally, num_rounds_of, rng_of
from faults import children_of

pytest.importorskip("torch")

from seer.engine.local.tiny import make_tiny_model

DRIVER_ROUNDS = num_rounds_of("driver")
PROMPTS = [[3 + i, 7, 11] for i in range(5)]
DISK = "64k"
SHARED_MEMORY = "6m"


class Run:
    """One run of the command, and what it left."""

    def __init__(self, model: Path, prompts: Path, folder: Path, rng: random.Random) -> None:
        self.folder = folder
        self.rng = rng
        self.prompts = prompts
        sizes = ["--max-tokens", "256", "--n", "3", "--chunk-tokens", "16", "--kv-memory", "8MiB"]
        self.words = [
            "rollout",
            "--model",
            str(model),
            "--prompts",
            str(prompts),
            "--instances",
            "2",
            "--no-pin",
            *sizes,
        ]
        self.words += ["--pool-memory", "8MiB", "--quiet", "--json"]
        self.files: set[Path] = set()

    def start(self) -> subprocess.Popen[str]:
        return a_command(*self.words, "--run-dir", str(self.folder))

    def wait_for_chunks(self, process: subprocess.Popen[str]) -> bool:
        """Wait until a number of chunks has ended; False if the run ended first."""
        wanted = self.rng.randrange(1, 100)
        journal = self.folder / "journal.jsonl"
        wait_until(lambda: num_lines(journal) > wanted or process.poll() is not None, "the run writes no journal")
        if process.poll() is not None:
            return False
        self.files = shared_files(process.pid)
        return True

    def end(self, process: subprocess.Popen[str], *codes: int) -> str:
        out, printed = process.communicate(timeout=DEADLINE_S)
        assert process.returncode in codes, f"exit code {process.returncode}: {printed}"
        assert "Traceback" not in printed, printed
        return out + printed


def kill(run: Run) -> None:
    process = run.start()
    run.wait_for_chunks(process)
    process.kill()
    run.end(process, 0, -signal.SIGKILL)


def by_signals(*numbers: signal.Signals) -> Callable[[Run], None]:
    def strike(run: Run) -> None:
        process = run.start()
        if run.wait_for_chunks(process):
            for number in numbers:
                process.send_signal(number)
        run.end(process, 0, 128 + numbers[0])
        assert_nothing_left(run.folder, run.files)

    return strike


def suspend(run: Run) -> None:
    process = run.start()
    if run.wait_for_chunks(process):
        process.send_signal(signal.SIGSTOP)
        time.sleep(run.rng.uniform(0.1, 2.0))
        process.send_signal(signal.SIGCONT)
    run.end(process, 0)


def cut_journal(run: Run) -> None:
    """Kill it, and cut the last line of its journal off, as a kill during the write does."""
    kill(run)
    journal = run.folder / "journal.jsonl"
    content = journal.read_bytes()
    last = content.rstrip(b"\n").rfind(b"\n") + 1
    if last:  # beyond the header
        os.truncate(journal, run.rng.randrange(last, len(content)))


def change_journal(run: Run) -> None:
    """Kill it, and change a byte of its last line: the journal must be refused."""
    kill(run)
    journal = run.folder / "journal.jsonl"
    content = bytearray(journal.read_bytes())
    last = content.rstrip(b"\n").rfind(b"\n") + 1
    end = content.rfind(b"\n")
    if not last or end <= last:
        return
    content[run.rng.randrange(last, end)] ^= 1
    journal.write_bytes(content)
    refused = a_command("rollout", "--resume", str(run.folder), "--quiet")
    run.end(refused, 2)
    again = a_command(*run.words, "--run-dir", str(run.folder), "--force")
    run.end(again, 0)


def fill_disk(run: Run) -> None:
    """The run's folder is on a disk of a few pages."""
    place = run.folder.parent
    _where_space_is_short(run, f"mount -t tmpfs -o size={DISK} none {place}", f"cp -r {place}/. {place}-seen")
    seen = place.with_name(f"{place.name}-seen")
    if (seen / "run").exists():
        (seen / "run").rename(run.folder)


def fill_shared_memory(run: Run) -> None:
    _where_space_is_short(run, f"mount -t tmpfs -o size={SHARED_MEMORY} none /dev/shm", "true")


def _where_space_is_short(run: Run, before: str, after: str) -> None:
    """Run it in a namespace of its own, in which these commands come before and after."""
    script = f'{before} && "$@"; code=$?; {after}; exit $code'
    command = [sys.executable, "-m", "seer.cli.main", *run.words, "--run-dir", str(run.folder)]
    process = subprocess.Popen(
        ["unshare", "--user", "--map-root-user", "--mount", "bash", "-c", script, "bash", *command],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env=dict(os.environ) | {"PYTHONPATH": os.pathsep.join(sys.path)},
    )
    run.end(process, 0, 1, 2)


STRIKES: dict[str, Callable[[Run], None]] = {
    "kill the driver": kill,
    "end the driver with Ctrl-C": by_signals(signal.SIGINT),
    "end the driver with SIGTERM": by_signals(signal.SIGTERM),
    "end the driver with Ctrl-C twice": by_signals(signal.SIGINT, signal.SIGINT),
    "suspend the driver": suspend,
    "cut the journal": cut_journal,
    "change the journal": change_journal,
    "fill the disk": fill_disk,
    "fill shared memory": fill_shared_memory,
}


def can_mount() -> bool:
    command = ["unshare", "--user", "--map-root-user", "--mount", "mount", "-t", "tmpfs", "none", "/mnt"]
    return subprocess.run(command, check=False, capture_output=True).returncode == 0


def finish(run: Run) -> None:
    """Resume the run if there is one to resume, or start it."""
    if (run.folder / "run.json").exists():
        process = a_command("rollout", "--resume", str(run.folder), "--quiet", "--force")
    else:
        process = a_command(*run.words, "--run-dir", str(run.folder), "--force")
    run.end(process, 0)


def test_no_fault_of_the_driver_loses_a_token_or_leaves_anything_behind(tmp_path: Path) -> None:
    model = make_tiny_model(tmp_path / "tiny")
    prompts = tmp_path / "prompts.jsonl"
    prompts.write_text("".join(json.dumps({"prompt_token_ids": ids}) + "\n" for ids in PROMPTS))
    whole = Run(model, prompts, tmp_path / "whole", random.Random(0))
    whole.end(whole.start(), 0)
    expected = results(whole.folder)
    kinds = [name for name in STRIKES if can_mount() or not name.startswith("fill")]
    tally = Tally("driver")
    while tally.goes_on(DRIVER_ROUNDS):
        number = tally.rounds
        rng = rng_of(tally.test, number)
        run = Run(model, prompts, tmp_path / f"round-{number}" / "run", rng)
        run.folder.parent.mkdir()
        kind = rng.choice(kinds)
        STRIKES[kind](run)
        wait_until(lambda run=run: not children_of(run.folder), "processes outlive their driver")  # type: ignore[misc]
        finish(run)
        tally.compare(results(run.folder), expected, [kind])
        tally.check_leftovers(run.files)
        assert_nothing_left(run.folder, set())
    tally.finish()
