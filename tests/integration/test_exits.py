# SPDX-License-Identifier: Apache-2.0
"""However a command is ended, the exit code says by what, and it leaves no process, shared memory or lock file."""

from __future__ import annotations

import errno
import json
import os
import select
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from commands import a_command, assert_nothing_left, num_lines, results, shared_files, wait_until

pytest.importorskip("torch")

from seer.cli.system_errors import explain
from seer.engine.local.tiny import make_tiny_model

DEADLINE_S = 300


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_tiny_model(tmp_path_factory.mktemp("model") / "tiny")


@pytest.fixture
def prompts(tmp_path: Path) -> Path:
    path = tmp_path / "prompts.jsonl"
    path.write_text("".join(json.dumps({"prompt_token_ids": [3 + i, 7, 11]}) + "\n" for i in range(40)))
    return path


def words(verb: str, model: Path, prompts: Path, run_dir: Path, *more: str) -> list[str]:
    sizes = ["--kv-memory", "8MiB", "--pool-memory", "8MiB", "--max-tokens", "500", "--n", "4"]
    return [
        verb,
        *["--model", str(model), "--prompts", str(prompts), "--run-dir", str(run_dir), "--instances", "2"],
        *[*sizes, "--no-pin", "--quiet", *more],
    ]


def end(process: subprocess.Popen[str], *numbers: int) -> str:
    for number in numbers:
        process.send_signal(number)
    out, printed = process.communicate(timeout=DEADLINE_S)
    assert "Traceback" not in printed, printed
    return out + printed


def status(run_dir: Path) -> str:
    return str(json.loads((run_dir / "run.json").read_text())["status"])


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGHUP])
def test_a_signal_ends_a_rollout_cleanly_and_it_can_be_resumed(
    model: Path, prompts: Path, tmp_path: Path, number: int
) -> None:
    run_dir = tmp_path / "run"
    process = a_command(*words("rollout", model, prompts, run_dir))
    wait_until(lambda: num_lines(run_dir / "journal.jsonl") > 5, "the run writes no journal", process)
    files = shared_files(process.pid)
    printed = end(process, number)
    assert process.returncode == 128 + number, printed
    assert files
    assert_nothing_left(run_dir, files)
    assert status(run_dir) == "interrupted"
    assert len(results(run_dir)) == 160
    if number == signal.SIGTERM:
        again = a_command("rollout", "--resume", str(run_dir), "--quiet")
        printed = end(again)
        assert again.returncode == 0, printed
        assert len(results(run_dir)) == 160
        assert status(run_dir) == "finished"


def test_a_second_signal_ends_a_rollout_whose_instances_hang(model: Path, prompts: Path, tmp_path: Path) -> None:
    run_dir = tmp_path / "run"
    process = a_command(*words("rollout", model, prompts, run_dir, "--set", "rollout.hosting.silence_deadline_s=600"))
    wait_until(lambda: num_lines(run_dir / "journal.jsonl") > 5, "the run writes no journal", process)
    files = shared_files(process.pid)
    stop_children(process.pid)
    process.send_signal(signal.SIGINT)
    assert process.stderr is not None
    assert any("again to stop at once" in line for line in iter(process.stderr.readline, ""))
    printed = end(process, signal.SIGINT)
    assert process.returncode == 128 + signal.SIGINT, printed
    assert_nothing_left(run_dir, files)
    assert status(run_dir) == "interrupted"
    results(run_dir)


def stop_children(pid: int) -> None:
    for child in children(pid):
        os.kill(child, signal.SIGSTOP)


def children(pid: int) -> list[int]:
    return [int(child) for child in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()]


def test_a_signal_ends_a_start(model: Path, prompts: Path, tmp_path: Path) -> None:
    run_dir = tmp_path / "run"
    process = a_command(*words("rollout", model, prompts, run_dir))
    wait_until((run_dir / "instance-1.log").exists, "no instance is started", process)
    files = shared_files(process.pid)
    printed = end(process, signal.SIGTERM)
    assert process.returncode == 128 + signal.SIGTERM, printed
    assert files
    assert_nothing_left(run_dir, files)
    assert status(run_dir) == "interrupted"


def test_a_signal_ends_a_comparison(model: Path, prompts: Path, tmp_path: Path) -> None:
    run_dir = tmp_path / "run"
    process = a_command(*words("compare", model, prompts, run_dir, "--schedulers", "verl,seer"))
    wait_until((run_dir / "verl-0" / "run.json").exists, "no run begins", process)
    files = shared_files(process.pid)
    printed = end(process, signal.SIGTERM)
    assert process.returncode == 128 + signal.SIGTERM, printed
    assert files
    assert_nothing_left(run_dir, files)
    assert status(run_dir / "verl-0") == "interrupted"


def test_a_program_that_forgets_its_rollout_leaves_nothing(model: Path, tmp_path: Path) -> None:
    program = f"""
import sys
from pathlib import Path
from seer import HostingConfig, SyncRollout
hosting = HostingConfig(pin_cores=False, log_dir=Path({str(tmp_path)!r}))
rollout = SyncRollout({str(model)!r}, instances=2, kv_blocks=64, pool_bytes=8 << 20, hosting=hosting)
rollout.__enter__()
print("up", flush=True)
sys.stdin.readline()
sys.exit(3)
"""
    process = subprocess.Popen(
        [sys.executable, "-c", program], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, cwd=tmp_path
    )
    assert process.stdout is not None
    assert process.stdout.readline() == "up\n"
    files = shared_files(process.pid)
    process.communicate("\n", timeout=DEADLINE_S)
    assert process.returncode == 3
    assert files
    assert_nothing_left(tmp_path, files)


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGKILL])
def test_workers_of_a_simulation_end_with_it(number: int) -> None:
    process = a_command("paper", "--processes", "2", "--json")
    wait_until(lambda: len(children(process.pid)) == 2, "no worker is started", process)
    workers = [os.pidfd_open(pid) for pid in children(process.pid)]
    end(process, number)
    assert process.returncode == (-number if number == signal.SIGKILL else 128 + number)
    for worker in workers:
        assert has_ended(worker), "a worker outlives its parent"
        os.close(worker)


def has_ended(pidfd: int) -> bool:
    poll = select.poll()
    poll.register(pidfd, select.POLLIN)
    return bool(poll.poll(1000 * DEADLINE_S))


def a_small_disk(folder: Path, size: str, *command: str) -> subprocess.Popen[str]:
    """A command in a namespace of its own, in which a folder is a file system of this size."""
    script = f'mount -t tmpfs -o size={size} none {folder} && "$@"; code=$?; cp -r {folder}/. {folder}.seen; exit $code'
    wrapped = ["unshare", "--user", "--map-root-user", "--mount", "bash", "-c", script, "bash", *command]
    environment = dict(os.environ) | {"PYTHONPATH": os.pathsep.join(sys.path)}
    return subprocess.Popen(wrapped, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=environment)


@pytest.fixture
def small_disks(tmp_path: Path) -> None:
    (tmp_path / "probe").mkdir()
    probe = a_small_disk(tmp_path / "probe", "1m", "true")
    probe.communicate()
    if probe.returncode:
        pytest.skip("needs a kernel that lets users mount in a namespace of theirs")


@pytest.mark.usefixtures("small_disks")
def test_a_full_disk_ends_a_rollout_at_once_and_what_was_written_is_whole(
    model: Path, prompts: Path, tmp_path: Path
) -> None:
    disk = tmp_path / "disk"
    disk.mkdir()
    run = words("rollout", model, prompts, disk / "run", "--json")
    process = a_small_disk(disk, "400k", sys.executable, "-m", "seer.cli.main", *run)
    printed = end(process)
    assert process.returncode == 1, printed
    assert "No space left on device" in printed
    assert "hint: " in printed
    assert "was lost" not in printed, "no instance is to blame"
    run_dir = tmp_path / "disk.seen" / "run"
    assert_nothing_left(run_dir, set())
    results(run_dir)


@pytest.mark.parametrize("number", [errno.ENOSPC, errno.EROFS, errno.EACCES, errno.ENOENT, errno.ENAMETOOLONG])
def test_errors_of_the_system_are_not_called_bugs(number: int) -> None:
    explanation = explain(OSError(number, os.strerror(number), "/some/file"))
    assert explanation is not None
    assert explanation.message == f"/some/file: {os.strerror(number)}"
    assert explanation.exit_code == (1 if number == errno.ENOSPC else 2)


def test_output_that_cannot_be_written_is_one_line_and_exit_code_1() -> None:
    command = [sys.executable, "-m", "seer.cli.main", "doctor", "--json"]
    with open("/dev/full", "w") as full:
        ran = subprocess.run(command, check=False, stdout=full, stderr=subprocess.PIPE, text=True)
    assert ran.returncode == 1
    assert ran.stderr.startswith("error: No space left on device\nhint: ")
    assert ran.stderr.count("\n") == 2
