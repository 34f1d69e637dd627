# SPDX-License-Identifier: Apache-2.0
"""`seer pool` and `seer bench pool`, as a user meets them."""

from __future__ import annotations

import json
import uuid
from pathlib import Path

import numpy as np
import pytest

from seer.cli.main import main
from seer.errors import SeerError
from seer.kvpool.local import LocalPool
from seer.kvpool.local_files import LocalPoolConfig


def test_up_status_down(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    where = ["--name", uuid.uuid4().hex, "--dram-dir", str(tmp_path)]
    up = [
        "pool",
        "up",
        *where,
        "--dram",
        "1MiB",
        "--ssd",
        "2MiB",
        "--ssd-dir",
        str(tmp_path),
        "--block",
        "64KiB",
    ]
    assert main([*up, "--json"]) == 0
    try:
        state = json.loads(capsys.readouterr().out)
        assert state["backend"] == "local"

        assert main(up) == 1
        assert "is up already" in capsys.readouterr().err

        with LocalPool.attach(where[1], str(tmp_path)) as worker:
            block = np.ones(1000, np.uint8)
            assert worker.put_now([bytes(32)], [block]) == [True]
        assert main(["pool", "status", *where, "--json"]) == 0
        report = json.loads(capsys.readouterr().out)
        assert report["live_pids"] == [state["pid"]]
        assert report["stats"]["num_blocks"] == 1
        assert report["stats"]["dram_bytes"] == 1000
        assert main(["pool", "status", *where]) == 0
        assert where[1][:8] in capsys.readouterr().out
        assert main(["pool", "status", "--dram-dir", str(tmp_path), "--name", "another"]) == 1
        assert "there is no pool named 'another'" in capsys.readouterr().err
    finally:
        assert main(["pool", "down", *where]) == 0
    assert "is gone" in capsys.readouterr().out
    assert [path for path in tmp_path.rglob("*") if not path.is_dir()] == []
    assert main(["pool", "down", *where]) == 1
    assert "no pool named" in capsys.readouterr().err


def test_a_pool_that_cannot_start_says_why_in_one_line(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    where = ["--name", uuid.uuid4().hex, "--dram-dir", str(tmp_path)]
    missing = str(tmp_path / "missing")
    assert main(["pool", "up", *where, "--dram", "1MiB", "--ssd", "2MiB", "--ssd-dir", missing, "--block", "4KiB"]) == 1
    error = capsys.readouterr().err
    assert "pool.ssd_dir" in error
    assert "is not a folder" in error
    assert "hint: create it" in error


@pytest.mark.parametrize(
    ("words", "what"),
    [
        (["--dram", "0"], "less than 4 blocks"),
        (["--dram", "1MiB", "--block", "0"], "outside 1 B..2 GiB"),
        (["--dram", "1MiB", "--block", "4KiB", "--ssd", "1MiB"], "pool.ssd_dir is not"),
        (["--dram", "1MiB", "--block", "4KiB", "--run", "x" * 100], "the limit is 87"),
    ],
)
def test_sizes_that_no_pool_can_have_are_wrong_arguments(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], words: list[str], what: str
) -> None:
    assert main(["pool", "up", "--name", uuid.uuid4().hex, "--dram-dir", str(tmp_path), *words]) == 2
    assert what in capsys.readouterr().err


def test_a_pool_beyond_the_machine_is_refused_with_what_fits_and_leaves_nothing(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    where = ["--name", uuid.uuid4().hex, "--dram-dir", str(tmp_path)]
    assert main(["pool", "up", *where, "--dram", "900TiB", "--block", "1GiB"]) == 2
    error = capsys.readouterr().err
    assert "a pool of 900.0 TiB, and this machine has" in error
    assert "hint: --dram" in error
    assert list(tmp_path.rglob("*")) == []


def test_a_pool_that_is_refused_leaves_no_lock(tmp_path: Path) -> None:
    config = LocalPoolConfig(block_bytes=1 << 30, dram_bytes=900 << 40, name="big", dram_dir=str(tmp_path))
    with pytest.raises(SeerError):
        LocalPool(config)
    assert [path for path in tmp_path.rglob("*") if path.is_file()] == []


def test_down_stale_removes_only_what_nobody_uses(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    def a_config(name: str) -> LocalPoolConfig:
        return LocalPoolConfig(name=name, block_bytes=4096, dram_bytes=1 << 20, dram_dir=str(tmp_path), populate=False)

    LocalPool(a_config("dead")).close()
    with LocalPool(a_config("alive")) as pool:
        assert main(["pool", "down", "--stale", "--dram-dir", str(tmp_path)]) == 0
        assert capsys.readouterr().out == "pool 'dead' is gone\n"
        assert main(["pool", "down", "--name", "alive", "--dram-dir", str(tmp_path)]) == 1
        assert "was opened by a run" in capsys.readouterr().err
        pool.close(remove=True)


def test_bench_pool_refuses_a_round_that_holds_no_call(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["bench", "pool", "--block", "64KiB", "4MiB", "--round", "16MiB"]) == 2
    error, hint = capsys.readouterr().err.splitlines()
    assert error == "error: --round 16.0 MiB is less than one call, 16 blocks of 4.0 MiB"
    assert hint == "hint: --round 67108864, or a smaller --batch or --block"


def test_bench_pool_measures_and_checks(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["bench", "pool", "--block", "64KiB", "--round", "4MiB", "--rounds", "2", "--json"]) == 0
    speed = json.loads(capsys.readouterr().out)
    assert speed["backend"] == "local"
    assert all(speed[k]["median"] > 0 for k in ("put_bytes_s", "get_bytes_s", "memcpy_bytes_s", "lookup_s"))


def test_a_word_that_is_no_size_is_refused(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        main(["pool", "up", "--dram", "much"])
    assert "is not a size" in capsys.readouterr().err
