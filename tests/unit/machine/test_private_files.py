# SPDX-License-Identifier: Apache-2.0
"""Files of this user alone: where they may lie, what is refused, and who is alive."""

from __future__ import annotations

import os
import stat
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from seer.errors import ConfigError, InputError
from seer.machine import file_lock, owned_folders, private_files
from seer.machine.file_lock import FileLock

STRANGER = 12345
as_root = pytest.mark.skipif(os.geteuid() != 0, reason="only root can make files of another user")


def a_file(path: Path, content: bytes = b"x", mode: int = 0o600) -> Path:
    path.write_bytes(content)
    path.chmod(mode)
    return path


def a_process(answer: str, *words: str) -> tuple[subprocess.Popen[str], str]:
    """A process that has evaluated and printed something, and waits."""
    imports = "import sys; from pathlib import Path; from seer.machine import file_lock, owned_folders, private_files"
    program = f"{imports}; it = {answer}; print(it, flush=True); input()"
    child = subprocess.Popen(
        [sys.executable, "-c", program, *words], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    )
    assert child.stdout is not None
    return child, child.stdout.readline().strip()


def end(child: subprocess.Popen[str]) -> None:
    child.kill()
    child.wait(20)
    assert child.stdin is not None
    assert child.stdout is not None
    child.stdin.close()
    child.stdout.close()


def test_the_folder_is_its_users_alone_and_the_same_each_time(tmp_path: Path) -> None:
    old = os.umask(0)
    try:
        made = private_files.folder(tmp_path)
    finally:
        os.umask(old)
    assert made == tmp_path / f"seer-{os.geteuid()}"
    assert stat.S_IMODE(made.stat().st_mode) == 0o700
    assert private_files.folder(tmp_path) == private_files.find_folder(tmp_path) == made


def test_looking_for_a_folder_makes_none(tmp_path: Path) -> None:
    assert private_files.find_folder(tmp_path) is None
    assert private_files.find_folder(tmp_path / "missing") is None
    assert list(tmp_path.iterdir()) == []


@as_root
@pytest.mark.parametrize("kind", ["folder", "file", "link"])
def test_a_name_that_another_user_took_first_is_left_alone_and_stops_no_one(tmp_path: Path, kind: str) -> None:
    taken, elsewhere = tmp_path / f"seer-{os.geteuid()}", tmp_path / "elsewhere"
    elsewhere.mkdir(mode=0o700)
    if kind == "folder":
        taken.mkdir(mode=0o700)
    elif kind == "file":
        taken.touch()
    else:
        taken.symlink_to(elsewhere)
    os.lchown(taken, STRANGER, STRANGER)
    made = private_files.folder(tmp_path)
    assert made not in (taken, elsewhere)
    assert made.parent == tmp_path
    assert private_files.folder(tmp_path) == made
    (made / "mine").touch()
    if kind == "folder":
        taken.rmdir()
        assert private_files.folder(tmp_path) == made, "files made before are still found"
    assert list(elsewhere.iterdir()) == []


@as_root
def test_a_folder_of_another_user_is_not_taken_for_one_of_ours(tmp_path: Path) -> None:
    for name in (f"seer-{os.geteuid()}", f"seer-{os.geteuid()}-{'0' * 16}"):
        (tmp_path / name).mkdir(mode=0o700)
        os.chown(tmp_path / name, STRANGER, STRANGER)
    assert private_files.find_folder(tmp_path) is None
    with pytest.raises(ConfigError, match=f"belongs to user {STRANGER}"):
        private_files.check_folder(tmp_path / f"seer-{os.geteuid()}")


def test_an_own_folder_that_others_can_open_is_refused_with_the_cure(tmp_path: Path) -> None:
    private_files.folder(tmp_path).chmod(0o750)
    with pytest.raises(ConfigError, match="0750") as caught:
        private_files.folder(tmp_path)
    assert caught.value.hint is not None
    assert "chmod 700" in caught.value.hint


def test_an_own_link_or_file_in_place_of_the_folder_is_refused(tmp_path: Path) -> None:
    (tmp_path / "elsewhere").mkdir(mode=0o700)
    place = tmp_path / f"seer-{os.geteuid()}"
    place.symlink_to(tmp_path / "elsewhere")
    with pytest.raises(ConfigError, match="not a directory"):
        private_files.folder(tmp_path)
    place.unlink()
    place.touch()
    with pytest.raises(ConfigError, match="not a directory"):
        private_files.folder(tmp_path)


def test_a_base_in_which_others_can_replace_files_is_refused(tmp_path: Path) -> None:
    tmp_path.chmod(0o777)
    with pytest.raises(ConfigError, match="sticky"):
        private_files.folder(tmp_path)
    tmp_path.chmod(0o1777)
    assert private_files.folder(tmp_path).is_dir()


def a_link(path: Path) -> None:
    path.symlink_to(a_file(path.with_name("target")))


def a_foreign_file(path: Path) -> None:
    os.chown(a_file(path), STRANGER, STRANGER)


REFUSED: dict[str, Callable[[Path], object]] = {
    "link": a_link,
    "FIFO": lambda path: os.mkfifo(path, 0o600),
    "folder": lambda path: path.mkdir(0o700),
    "readable": lambda path: a_file(path, mode=0o644),
    "writable": lambda path: a_file(path, mode=0o622),
}


@pytest.mark.parametrize("kind", [*REFUSED, pytest.param("foreign", marks=as_root)])
def test_what_is_not_a_regular_file_of_this_user_alone_is_neither_read_nor_removed(tmp_path: Path, kind: str) -> None:
    path = tmp_path / "it"
    REFUSED.get(kind, a_foreign_file)(path)
    with pytest.raises(InputError):
        private_files.read(path)
    with pytest.raises(InputError):
        FileLock.acquire(path)
    with pytest.raises(InputError):
        private_files.check_file(path)
    if kind not in ("readable", "writable"):  # these are this user's, so they may go
        assert not private_files.remove(path)
        assert os.path.lexists(path)
    assert [p.name for p in tmp_path.iterdir() if p.name == "target"] == (["target"] if kind == "link" else [])


def test_a_socket_is_refused_too(tmp_path: Path) -> None:
    os.mknod(tmp_path / "it", 0o600 | stat.S_IFSOCK)
    with pytest.raises(InputError, match="not a regular file"):
        private_files.read(tmp_path / "it")


def test_reading_has_a_limit(tmp_path: Path) -> None:
    assert private_files.read(a_file(tmp_path / "it", b"123"), max_bytes=3) == b"123"
    with pytest.raises(InputError, match="more than 2 bytes"):
        private_files.read(tmp_path / "it", max_bytes=2)


def test_a_file_is_written_anew_whatever_stood_in_its_place(tmp_path: Path) -> None:
    target = a_file(tmp_path / "target", b"old")
    (tmp_path / "it").symlink_to(target)
    (tmp_path / "it.tmp").symlink_to(target)
    private_files.write(tmp_path / "it", b"new")
    assert target.read_bytes() == b"old"
    assert private_files.read(tmp_path / "it") == b"new"
    assert sorted(p.name for p in tmp_path.iterdir()) == ["it", "target"]


def test_a_lock_has_one_holder_and_its_file_goes_with_it(tmp_path: Path) -> None:
    path = tmp_path / "lock"
    assert not file_lock.is_held(path)
    held = FileLock.acquire(path)
    assert held is not None
    assert file_lock.is_held(path)
    assert file_lock.holds(os.getpid(), path)
    assert FileLock.acquire(path) is None
    assert file_lock.is_held(path), "looking does not take it away"
    held.release()
    assert not path.exists()
    assert not file_lock.is_held(path)


def test_a_lock_on_a_file_that_was_removed_is_not_believed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path, set_lock = tmp_path / "lock", file_lock._set_lock

    def removed_meanwhile(descriptor: int) -> bool:
        monkeypatch.setattr(file_lock, "_set_lock", set_lock)
        path.unlink()
        return set_lock(descriptor)

    monkeypatch.setattr(file_lock, "_set_lock", removed_meanwhile)
    held = FileLock.acquire(path)
    assert held is not None
    assert file_lock.is_held(path), "the file that others see is the one that is locked"
    held.release()


def test_the_kernel_releases_the_lock_of_a_killed_process(tmp_path: Path) -> None:
    path = tmp_path / "lock"
    child, _ = a_process("file_lock.FileLock.acquire(Path(sys.argv[1]))", str(path))
    assert FileLock.acquire(path) is None
    assert file_lock.holds(child.pid, path)
    assert not file_lock.holds(os.getpid(), path)
    end(child)
    assert not file_lock.is_held(path)
    assert not file_lock.holds(child.pid, path)
    held = FileLock.acquire(path)
    assert held is not None
    held.release()


def test_folders_of_killed_processes_are_removed_and_those_of_living_ones_are_not(tmp_path: Path) -> None:
    home = private_files.folder(tmp_path)
    before, children = [owned_folders.make_folder("kind", tmp_path)], []
    for _ in range(2):
        child, made = a_process("owned_folders.make_folder('kind', sys.argv[1])", str(tmp_path))
        children.append(child)
        before.append(Path(made))
    (before[1] / "weights").write_bytes(b"x" * 100)
    assert all(path.is_dir() for path in before)
    end(children[0])
    after = owned_folders.make_folder("other", tmp_path)
    assert [path.exists() for path in before] == [True, False, True]
    for path in (before[0], after):
        owned_folders.remove_folder(path)
    end(children[1])
    assert owned_folders.remove_orphans(home) == [before[2]]
    assert list(home.iterdir()) == []


def test_a_child_that_inherits_the_lock_keeps_the_folder(tmp_path: Path) -> None:
    made = owned_folders.make_folder("kind", tmp_path)
    child = subprocess.Popen(
        [sys.executable, "-c", "input()"], stdin=subprocess.PIPE, pass_fds=[owned_folders.lock_descriptor(made)]
    )
    owned_folders.disown(made)
    assert owned_folders.remove_orphans(made.parent) == []
    assert child.stdin is not None
    child.stdin.close()
    child.wait(20)
    assert owned_folders.remove_orphans(made.parent) == [made]


def test_what_others_call_like_a_lock_is_left(tmp_path: Path) -> None:
    home = private_files.folder(tmp_path)
    os.mkfifo(home / f"kind-{'0' * 16}.folder.lock")
    (home / f"kind-{'1' * 16}.folder.lock").symlink_to(a_file(tmp_path / "target"))
    (home / "anything").mkdir()
    made = owned_folders.make_folder("kind", tmp_path)
    owned_folders.remove_folder(made)
    assert len(list(home.iterdir())) == 3
    assert (tmp_path / "target").read_bytes() == b"x"


def test_folders_leave_no_descriptor_open(tmp_path: Path) -> None:
    def num_open() -> int:
        return len(os.listdir("/proc/self/fd"))

    before = num_open()
    for _ in range(5):
        owned_folders.remove_folder(owned_folders.make_folder("kind", tmp_path))
    assert num_open() == before


def test_inside_is_only_what_lies_in_the_own_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(private_files, "SHARED_MEMORY", tmp_path)
    home = private_files.folder(tmp_path)
    assert private_files.is_inside(home / "a" / "b")
    assert not private_files.is_inside(tmp_path / "b")
    assert not private_files.is_inside(home / ".." / "b")
