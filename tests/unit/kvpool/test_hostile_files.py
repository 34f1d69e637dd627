# SPDX-License-Identifier: Apache-2.0
"""Files that another user, another container or a killed process left where pools are kept: none is believed.

Each is planted in the folder that all users share and, where it can lie there at all, in this user's own.
"""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import msgspec
import numpy as np
import pytest

from seer.cli.main import main
from seer.errors import ConfigError, PoolError
from seer.hosting import fleet_pool
from seer.hosting.fleet_pool import FleetPool
from seer.kvpool import local_files, supervise
from seer.kvpool.local import LocalPool
from seer.kvpool.local_files import LocalPoolConfig, PoolFiles, find_pools
from seer.kvpool.open_pool import join_pool, open_pool
from seer.kvpool.serve import ServeState, pid_started
from seer.machine import file_lock, private_files

STRANGER = 12345
as_root = pytest.mark.skipif(os.geteuid() != 0, reason="only root can make files of another user")


def a_config(tmp_path: Path, name: str) -> LocalPoolConfig:
    return LocalPoolConfig(
        name=name,
        block_bytes=4096,
        dram_bytes=1 << 20,
        ssd_bytes=1 << 20,
        ssd_dir=str(tmp_path),
        dram_dir=str(tmp_path),
        populate=False,
        keeper=False,
    )


def places(tmp_path: Path, name: str, suffix: str) -> list[Path]:
    """In the shared folder, as if named by the scheme of a pool's files, and in the own one."""
    return [
        tmp_path / f"seer-pool-{os.geteuid()}-{name}.{suffix}",
        private_files.folder(tmp_path) / f"pool-{name}.{suffix}",
    ]


def a_state(name: str, pid: int, backend: str = "local") -> bytes:
    addresses = {"owner": "192.0.2.1:1", "metrics": "192.0.2.1:2", "master": "192.0.2.1:3"}
    state = ServeState(
        backend=backend, name=name, pid=pid, pid_started=pid_started(pid) or 0, since_unix_s=0.0, addresses=addresses
    )
    return msgspec.json.encode(state)


@pytest.fixture
def bystander() -> Iterator[subprocess.Popen[bytes]]:
    """A process that has nothing to do with any pool."""
    child = subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE)
    yield child
    assert child.poll() is None, "it was signalled"
    assert child.stdin is not None
    child.stdin.close()
    child.wait(20)


@pytest.mark.parametrize("victim_at", ["seer/precious", "elsewhere/pool-dead.slab"])
def test_a_note_does_not_get_a_foreign_file_removed(
    tmp_path: Path, victim_at: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "elsewhere").mkdir(mode=0o700)
    victim = tmp_path / victim_at.replace("seer/", f"{private_files.folder(tmp_path).name}/")
    victim.write_text("precious")
    LocalPool(a_config(tmp_path, "dead")).close()
    (note,) = tmp_path.rglob("*dead.json")
    note.write_text(json.dumps(json.loads(note.read_text()) | {"slab": str(victim)}))
    monkeypatch.setattr(local_files, "_STALE_AFTER_S", -1.0)
    with LocalPool(a_config(tmp_path, "new")) as pool:
        assert [found.name for found in find_pools(str(tmp_path))] == ["new"]
        pool.close(remove=True)
    assert victim.read_text() == "precious"


@pytest.mark.parametrize("gone", ["slab", "json"])
def test_a_pool_that_lost_a_file_is_listed_with_its_problem(
    tmp_path: Path, gone: str, capsys: pytest.CaptureFixture[str]
) -> None:
    for name in ("broken", "whole"):
        LocalPool(a_config(tmp_path, name)).close()
    (private_files.folder(tmp_path) / f"pool-broken.{gone}").unlink()
    assert main(["pool", "status", "--dram-dir", str(tmp_path), "--json"]) == 0
    reports = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    assert [(report["name"], "SSD" in report["problem"]) for report in reports] == [("broken", True), ("whole", False)]


@as_root
@pytest.mark.parametrize("suffix", ["json", "arena", "lock", "owner", "state"])
def test_a_file_of_another_user_stops_nothing(tmp_path: Path, suffix: str, capsys: pytest.CaptureFixture[str]) -> None:
    planted = places(tmp_path, "theirs", suffix)
    for path in planted:
        path.write_text("{}")
        path.chmod(0o666)
        os.chown(path, STRANGER, STRANGER)
    with LocalPool(a_config(tmp_path, "new")) as pool:
        assert main(["pool", "status", "--dram-dir", str(tmp_path)]) == 0
        assert main(["pool", "down", "--stale", "--dram-dir", str(tmp_path)]) == 0
        assert "'new'" not in capsys.readouterr().out.splitlines()[-1]
        pool.close(remove=True)
    assert all(path.exists() for path in planted), "what another user made stays"


@pytest.mark.parametrize("kind", ["ill-named", "FIFO", "link", "folder"])
@pytest.mark.parametrize("suffix", ["json", "arena", "lock", "owner", "state"])
def test_a_file_that_is_none_of_ours_stops_and_delays_nothing(
    tmp_path: Path, kind: str, suffix: str, capsys: pytest.CaptureFixture[str]
) -> None:
    victim = tmp_path / "precious"
    victim.write_text("precious")
    for path in places(tmp_path, "not a name" if kind == "ill-named" else "odd", suffix):
        if kind == "FIFO":
            os.mkfifo(path, 0o600)
        elif kind == "link":
            path.symlink_to(victim)
        elif kind == "folder":
            path.mkdir(0o700)
        else:
            path.touch(0o600)
    with LocalPool(a_config(tmp_path, "new")) as pool:
        assert "new" in {found.name for found in find_pools(str(tmp_path))}
        assert supervise.find_states(str(tmp_path)) == []
        assert main(["pool", "status", "--dram-dir", str(tmp_path)]) == 0
        assert main(["pool", "down", "--stale", "--dram-dir", str(tmp_path)]) == 0
        with pytest.raises(PoolError):
            LocalPool.attach("odd", str(tmp_path))
        pool.close(remove=True)
    assert victim.read_text() == "precious"
    capsys.readouterr()


def test_a_state_file_gets_no_process_killed(
    tmp_path: Path, bystander: subprocess.Popen[bytes], capsys: pytest.CaptureFixture[str]
) -> None:
    for path in places(tmp_path, "x", "state"):
        path.write_bytes(a_state("x", bystander.pid))
        path.chmod(0o600)
    assert supervise.find_state("x", str(tmp_path)) is None
    assert main(["pool", "down", "--name", "x", "--dram-dir", str(tmp_path)]) == 1
    assert "no pool named 'x'" in capsys.readouterr().err
    assert bystander.poll() is None
    assert list(private_files.folder(tmp_path).iterdir()) == [], "what a killed process left is gone"


@pytest.mark.parametrize("who", ["a bystander", "no process"])
def test_a_process_that_does_not_hold_the_pools_lock_is_not_signalled(
    tmp_path: Path, bystander: subprocess.Popen[bytes], who: str, capsys: pytest.CaptureFixture[str]
) -> None:
    """As when the pool's process runs in another container, where it has another number."""
    with subprocess.Popen([sys.executable, "-c", ""]) as gone:
        gone.wait(20)
    files = PoolFiles.named("x", str(tmp_path))
    owner = file_lock.FileLock.acquire(files.owner)
    assert owner is not None
    private_files.write(files.state, a_state("x", bystander.pid if who == "a bystander" else gone.pid))
    assert supervise.find_state("x", str(tmp_path)) is not None
    assert main(["pool", "down", "--name", "x", "--dram-dir", str(tmp_path)]) == 1
    assert "nothing was stopped" in capsys.readouterr().err
    assert bystander.poll() is None
    assert files.state.exists()
    owner.release()


def test_a_state_file_sends_no_rollout_to_a_foreign_address(
    tmp_path: Path, bystander: subprocess.Popen[bytes], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(fleet_pool, "DRAM_DIR", str(tmp_path))
    for path in places(tmp_path, "store", "state"):
        path.write_bytes(a_state("store", bystander.pid, "mooncake"))
        path.chmod(0o600)
    with pytest.raises(ConfigError, match="no Mooncake pool named 'store'"):
        FleetPool.mooncake("store", block_bytes=4096, block_size=16)


def test_the_pool_of_a_killed_process_is_found_started_anew_and_removed(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    where = ["--name", "x", "--dram-dir", str(tmp_path)]
    up = ["pool", "up", *where, "--dram", "1MiB", "--block", "64KiB", "--json"]
    for _ in range(2):
        assert main(up) == 0
        state = json.loads(capsys.readouterr().out)
        child = supervise._children.pop(state["pid"])
        child.kill()
        child.wait(20)
        assert supervise.find_state("x", str(tmp_path)) is None
        assert {path.suffix for path in private_files.folder(tmp_path).iterdir()} >= {".arena", ".owner", ".state"}
    assert main(["pool", "down", "--stale", "--dram-dir", str(tmp_path)]) == 0
    assert capsys.readouterr().out == "pool 'x' is gone\n"
    assert list(private_files.folder(tmp_path).iterdir()) == []


def test_files_without_an_arena_are_removed_too(tmp_path: Path) -> None:
    """A process may be killed between any two of the files it makes."""
    LocalPool(a_config(tmp_path, "x")).close()
    files = PoolFiles.named("x", str(tmp_path))
    files.arena.rename(f"{files.arena}.tmp")
    files.owner.touch(0o600)
    assert any(private_files.folder(tmp_path).glob("*.slab"))
    with LocalPool(a_config(tmp_path, "new")) as pool:
        assert not list(private_files.folder(tmp_path).glob("pool-x.*"))
        pool.close(remove=True)


@pytest.fixture
def fleet(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[FleetPool]:
    """A driver's pool that has begun, in a folder of the test's own."""
    monkeypatch.setattr(fleet_pool, "DRAM_DIR", str(tmp_path))
    pool = FleetPool.local(block_bytes=4096, block_size=16, dram_bytes=1 << 20)
    pool.settings["dram_dir"] = str(tmp_path)
    pool.start()
    yield pool
    with contextlib.suppress(PoolError):
        pool.close()


def test_the_pool_of_a_living_driver_stays_and_nothing_is_left_after_it(fleet: FleetPool, tmp_path: Path) -> None:
    fleet_pool.remove_orphaned_pools()
    (found,) = find_pools(str(tmp_path))
    assert found.has_owner
    assert not found.stale
    fleet.close()
    assert list(private_files.folder(tmp_path).iterdir()) == []


def test_a_driver_in_another_pid_namespace_is_alive(fleet: FleetPool, tmp_path: Path) -> None:
    apart = ["unshare", "--pid", "--fork", "--mount-proc"]
    if shutil.which("unshare") is None or subprocess.run([*apart, "true"], capture_output=True, check=False).returncode:
        pytest.skip("this user may not make a pid namespace")
    program = (
        "import sys, os; from seer.hosting import fleet_pool; fleet_pool.DRAM_DIR = sys.argv[1];"
        "assert not os.path.exists('/proc/' + sys.argv[2]), 'the driver can be seen';"
        "fleet_pool.remove_orphaned_pools()"
    )
    subprocess.run([*apart, sys.executable, "-c", program, str(tmp_path), str(os.getpid())], check=True, timeout=60)
    assert [found.name for found in find_pools(str(tmp_path))] == [fleet.settings["name"]]


def test_the_pool_of_a_killed_driver_is_removed_by_the_next(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    program = (
        "import sys; from seer.hosting import fleet_pool; fleet_pool.DRAM_DIR = sys.argv[1];"
        "pool = fleet_pool.FleetPool.local(block_bytes=4096, block_size=16, dram_bytes=1 << 20);"
        "pool.settings['dram_dir'] = sys.argv[1]; pool.start(); print('up', flush=True); input()"
    )
    driver = subprocess.Popen(
        [sys.executable, "-c", program, str(tmp_path)], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    )
    with driver:
        assert driver.stdout is not None
        assert driver.stdout.readline() == "up\n"
        driver.kill()
    assert len(find_pools(str(tmp_path))) == 1
    monkeypatch.setattr(fleet_pool, "DRAM_DIR", str(tmp_path))
    fleet_pool.remove_orphaned_pools()
    assert list(private_files.folder(tmp_path).iterdir()) == []


def test_an_instance_joins_a_damaged_pool_as_one_that_holds_nothing(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """A restarted instance must start, whatever became of the pool's files; what is missing is computed again."""
    settings = {"name": "run", "dram_dir": str(tmp_path), "block_bytes": 4096, "dram_bytes": 1 << 20}
    settings |= {"ssd_dir": str(tmp_path), "ssd_bytes": 1 << 20}
    with open_pool(settings) as made:
        assert isinstance(made, LocalPool)
        made._files.note.write_bytes(b"\xa5" * 40)  # it names the file of the SSD tier
        with join_pool(settings) as joined:
            keys, block = np.zeros((1, 32), np.uint8), np.zeros((1, 4096), np.uint8)
            assert joined.name == "lost"
            assert joined.put_now(keys, block) == joined.get_now(keys, block) == [False]
            assert joined.troubles().num_failed == joined.stats().num_failed == 2
    assert "the KV pool cannot be opened" in caplog.text


def test_an_instance_that_starts_after_its_pool_was_removed_does_not_make_it_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(fleet_pool, "DRAM_DIR", str(tmp_path))
    pool = fleet_pool.FleetPool.local(block_bytes=4096, block_size=1, dram_bytes=1 << 20)
    pool.settings["dram_dir"] = str(tmp_path)
    pool.start()
    with join_pool(pool.settings) as joined:
        assert joined.name == "local"
    pool.close()
    for settings in (pool.settings, {"backend": "mooncake", "near": pool.settings}):
        with join_pool(settings) as joined:
            assert joined.name == "lost"
    assert list(private_files.folder(tmp_path).iterdir()) == []
