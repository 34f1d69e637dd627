# SPDX-License-Identifier: Apache-2.0
"""Staged weights: leftovers of killed processes are removed, and weights that do not fit go to disk."""

from __future__ import annotations

import asyncio
import os
import shutil
import stat
import subprocess
import sys
import threading
from collections import namedtuple
from pathlib import Path
from typing import Any

import pytest

from seer.engine.staged_weights import StagedWeights, make_shared_folder, remove_shared_folder, stage, stage_in_thread
from seer.machine import private_files


@pytest.fixture
def memory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    for name in ("memory", "disk"):
        (tmp_path / name).mkdir()
    monkeypatch.setattr(private_files, "SHARED_MEMORY", tmp_path / "memory")
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path / "disk"))
    return tmp_path / "memory"


def a_process_with_a_folder(memory: Path, options: str = "") -> tuple[subprocess.Popen[str], Path]:
    program = (
        "import sys; from pathlib import Path;"
        "from seer.machine import private_files; from seer.engine import staged_weights;"
        "private_files.SHARED_MEMORY = Path(sys.argv[1]);"
        f"print(staged_weights.make_shared_folder('seer-weights', 1{options}), flush=True); input()"
    )
    child = subprocess.Popen(
        [sys.executable, "-c", program, str(memory)], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    )
    assert child.stdout is not None
    return child, Path(child.stdout.readline().strip())


def test_folders_of_processes_that_were_killed_are_removed_and_others_are_not(memory: Path) -> None:
    child, theirs = a_process_with_a_folder(memory)
    with child:
        mine = make_shared_folder("seer-model", 1)
        assert mine.parent == theirs.parent == memory / f"seer-{os.geteuid()}"
        assert theirs.is_dir()
        child.kill()
    after = make_shared_folder("seer-model", 1)
    assert [path.exists() for path in (theirs, mine, after)] == [False, True, True]
    for folder in (mine, after):
        remove_shared_folder(folder)
    assert list(mine.parent.iterdir()) == []


def test_a_folder_that_is_named_after_something_gets_its_old_name_again_and_shares_it_with_nobody(memory: Path) -> None:
    first = make_shared_folder("seer-model", 1, named_after=b"one")
    beside = make_shared_folder("seer-model", 1, named_after=b"one")
    other = make_shared_folder("seer-model", 1, named_after=b"another")
    assert len({first, beside, other}) == 3
    (first / "model").touch()
    remove_shared_folder(first)
    again = make_shared_folder("seer-model", 1, named_after=b"one")
    assert again == first
    assert list(again.iterdir()) == []
    for folder in (beside, other, again):
        remove_shared_folder(folder)
    assert list(memory.glob("*/*")) == []


def test_a_folder_with_an_old_name_is_empty_although_its_lock_was_gone(memory: Path) -> None:
    first = make_shared_folder("seer-model", 1, named_after=b"one")
    remove_shared_folder(first)
    first.mkdir()
    (first / "model").touch()
    again = make_shared_folder("seer-model", 1, named_after=b"one")
    assert again == first
    assert list(again.iterdir()) == []
    remove_shared_folder(again)


def test_the_name_of_a_killed_process_is_free_again(memory: Path) -> None:
    child, theirs = a_process_with_a_folder(memory, ", named_after=b'one'")
    with child:
        beside = make_shared_folder("seer-weights", 1, named_after=b"one")
        assert beside != theirs
        child.kill()
    again = make_shared_folder("seer-weights", 1, named_after=b"one")
    assert again == theirs
    for folder in (beside, again):
        remove_shared_folder(folder)


def test_the_folder_of_a_process_in_another_pid_namespace_stays(memory: Path) -> None:
    apart = ["unshare", "--pid", "--fork", "--mount-proc"]
    if shutil.which("unshare") is None or subprocess.run([*apart, "true"], capture_output=True, check=False).returncode:
        pytest.skip("this user may not make a pid namespace")
    mine = make_shared_folder("seer-weights", 1)
    program = (
        "import os, sys; from pathlib import Path;"
        "from seer.machine import private_files; from seer.engine import staged_weights;"
        "assert not os.path.exists('/proc/' + sys.argv[2]);"
        "private_files.SHARED_MEMORY = Path(sys.argv[1]); staged_weights.make_shared_folder('seer-weights', 1)"
    )
    subprocess.run([*apart, sys.executable, "-c", program, str(memory), str(os.getpid())], check=True, timeout=60)
    assert mine.is_dir()
    remove_shared_folder(mine)


def test_what_another_user_put_beside_it_is_left_alone(memory: Path) -> None:
    strange = memory / f"seer-weights-{2**22}-x"  # once the name of a folder whose process is gone
    strange.mkdir()
    (strange / "precious").touch()
    remove_shared_folder(make_shared_folder("seer-weights", 1))
    assert (strange / "precious").exists()


def test_weights_that_do_not_fit_go_to_disk_with_a_warning(
    memory: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    usage = namedtuple("usage", "total used free")
    monkeypatch.setattr("shutil.disk_usage", lambda path: usage(10, 5, 5))
    made = make_shared_folder("seer-model", 6)
    assert made.parent.parent == memory.parent / "disk"
    assert "docker run --shm-size" in caplog.text
    remove_shared_folder(made)
    assert list(made.parent.iterdir()) == []


def test_without_shared_memory_they_go_to_disk(memory: Path) -> None:
    memory.rmdir()
    made = make_shared_folder("seer-model", 6)
    assert made.parent.parent == memory.parent / "disk"
    remove_shared_folder(made)


def test_tensors_are_staged_for_this_user_alone_and_discarded_whole(memory: Path) -> None:
    torch = pytest.importorskip("torch")
    staged = stage({"a": torch.ones(3)})
    assert staged.home is not None
    assert stat.S_IMODE(staged.home.stat().st_mode) == 0o700
    assert staged.path.is_file()
    staged.discard()
    assert list(staged.home.parent.iterdir()) == []


def test_two_names_of_one_tensor_are_both_staged_and_pieces_of_one_as_they_are(memory: Path) -> None:
    """The state_dict of a model whose head is tied has two; experts that one tensor holds are pieces of it."""
    torch = pytest.importorskip("torch")
    from safetensors.torch import load_file

    tied, fused = torch.arange(6.0).reshape(3, 2), torch.arange(12.0).reshape(2, 3, 2)
    given = {"embedding": tied, "head": tied, "experts.0": fused[0], "experts.1": fused[1], "first": fused[0, :1]}
    staged = stage(given)
    found = load_file(staged.path)
    staged.discard()
    assert found.keys() == given.keys()
    assert all(torch.equal(found[name], given[name]) for name in given)


def test_tensors_that_cannot_be_staged_leave_nothing(memory: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    torch = pytest.importorskip("torch")

    def full(*_: object) -> None:
        raise OSError("no space left on device")

    monkeypatch.setattr("safetensors.torch.save_file", full)
    with pytest.raises(OSError, match="no space"):
        stage({"a": torch.ones(3)})
    assert list(private_files.folder(memory).iterdir()) == []


@pytest.mark.parametrize("is_cancelled", [False, True])
def test_the_event_loop_goes_on_while_tensors_are_copied_and_a_cancelled_copy_leaves_nothing(
    is_cancelled: bool, memory: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    torch = pytest.importorskip("torch")
    is_copying, may_end = threading.Event(), threading.Event()
    save = safetensors_torch().save_file

    def slow(*arguments: object) -> None:
        is_copying.set()
        assert may_end.wait(60.0), "the event loop did not go on"
        save(*arguments)

    monkeypatch.setattr("safetensors.torch.save_file", slow)

    async def scenario() -> None:
        staging = asyncio.create_task(stage_in_thread({"a": torch.ones(3)}))
        await asyncio.to_thread(is_copying.wait)
        if is_cancelled:
            staging.cancel()
            await asyncio.sleep(0)
        may_end.set()
        if is_cancelled:
            with pytest.raises(asyncio.CancelledError):
                await staging
        else:
            staged = await staging
            assert staged.path.is_file()
            staged.discard()

    asyncio.run(scenario())
    assert list(private_files.folder(memory).iterdir()) == []


def safetensors_torch() -> Any:
    return pytest.importorskip("safetensors.torch")


def test_a_path_of_the_users_is_not_removed(tmp_path: Path) -> None:
    (tmp_path / "model").mkdir()
    StagedWeights((tmp_path / "model").resolve()).discard()
    assert (tmp_path / "model").is_dir()
