# SPDX-License-Identifier: Apache-2.0
"""The folder that a trainer writes for its whole life: run.json, lines of JSON, and folders of the newest rollouts.

A trainer's user may name a folder that holds checkpoints, and those are called `step-10` too.

Invariants
  1. One trainer writes here: the folder's lock is held from the making of this object to `close`.
  2. A folder of another kind of run, or with a `step-*` folder that no trainer of Seer wrote, is refused before
     anything is written.
  3. Old steps are removed only if a trainer wrote them and nothing is in them but what a trainer and `seer report`
     write.
"""

from __future__ import annotations

import contextlib
import errno
import logging
import os
import re
import stat
from pathlib import Path
from typing import Any

import msgspec

from seer.errors import InputError
from seer.runs.run_folder import MANIFEST, RunFolder, machine

log = logging.getLogger(__name__)

_STEP_NAME = re.compile(r"step-[0-9]{6,}(\.[0-9]+)?(-eval|-val)?")
_HINT = "name another run_dir: old steps of a training run are removed from its folder"


class TrainingRun:
    """A training run's folder, held."""

    def __init__(self, path: Path, *, keep_steps: int) -> None:
        """Lock the folder and look at what it holds; nothing else is written yet."""
        self.folder = RunFolder(path)
        self._keep_steps = keep_steps
        self._facts: dict[str, Any] = {}
        with contextlib.ExitStack() as stack:
            stack.enter_context(self.folder.held())
            _refuse_other_run(self.folder)
            self._kept = _find_steps(path)
            self._held = stack.pop_all()

    def begin(self, facts: dict[str, Any]) -> None:
        """Write run.json with these options and limits."""
        self._facts = facts
        self._write("running")

    def open_step(self, name: str) -> RunFolder | None:
        """The folder of a rollout that is about to begin, which is not made yet; older ones make room. None where
        none is kept."""
        if not self._keep_steps:
            return None
        step = RunFolder(self.folder.path / f"step-{name}")
        assert _STEP_NAME.fullmatch(step.path.name), f"a step's folder would not be known again: {step.path.name}"
        self._kept = [path for path in self._kept if path != step.path]
        while len(self._kept) >= self._keep_steps:
            _remove_step(self._kept.pop(0))
        self._kept.append(step.path)
        return step

    def append(self, name: str, line: Any) -> None:
        """Append a line to a file of the folder; a link or anything but a plain file is refused."""
        path = self.folder.path / name
        flags = os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC
        try:
            descriptor = os.open(path, flags, 0o666)
        except OSError as error:
            if error.errno not in (errno.ELOOP, errno.ENXIO):
                raise
            raise InputError(f"{path} is a link or a pipe, not a plain file", hint="remove it") from None
        with open(descriptor, "ab") as file:
            if not stat.S_ISREG(os.fstat(file.fileno()).st_mode):
                raise InputError(f"{path} is not a plain file", hint="remove it")
            file.write(msgspec.json.encode(line) + b"\n")

    def close(self) -> None:
        """The training has ended: let others write here. A second time changes nothing."""
        with self._held:  # also if the disk is full
            if self._facts:
                self._write("finished")
                self._facts = {}

    def _write(self, status: str) -> None:
        self.folder.write_manifest({"command": "train", **self._facts, "machine": machine(), "status": status})


def _refuse_other_run(folder: RunFolder) -> None:
    if os.path.lexists(folder.manifest):
        command = folder.read_facts().command
        if command != "train":
            raise InputError(f"{folder.path} holds a run of `seer {command}`, not of a trainer", hint=_HINT)
        return
    for name in ("rollouts.jsonl", "trainer.jsonl"):
        if os.path.lexists(folder.path / name):
            raise InputError(f"{folder.path} holds {name}, and no {MANIFEST} that says whose it is", hint=_HINT)


def _find_steps(path: Path) -> list[Path]:
    """The steps of an earlier part of this training, oldest first."""
    found = [step for step in path.glob("step-*") if step.is_dir()]
    for step in found:
        if not _is_ours(step):
            raise InputError(f"{step} is not a step that a trainer of Seer wrote", hint=_HINT)
    return sorted(found, key=lambda step: step.stat().st_mtime)


def _is_ours(step: Path) -> bool:
    """Whether a trainer wrote a step's folder: run.json says so, or a kill left it empty.

    A trainer's rollout has no configuration in run.json; one of `seer rollout` does.
    """
    if step.is_symlink() or not _STEP_NAME.fullmatch(step.name):
        return False
    if not os.path.lexists(step / MANIFEST):
        return not any(one.name != f"{MANIFEST}.partial" for one in step.iterdir())
    try:
        facts = RunFolder(step).read_facts()
    except InputError:
        return False
    return facts.command == "rollout" and facts.config is None


def _remove_step(path: Path) -> None:
    if not os.path.lexists(path):
        return  # the user has removed it
    step = RunFolder(path)
    written = {one.name for one in (step.manifest, step.events, step.report, step.trace)}
    written |= {f"{name}.partial" for name in written}
    with contextlib.suppress(OSError):  # a step that cannot be removed costs disk space, and no training
        others = sorted({one.name for one in path.iterdir()} - written)
        if others or not _is_ours(path):
            log.warning("%s is kept: %s in it is not of this training", path, others[0] if others else MANIFEST)
            return
        for one in sorted(path.iterdir(), key=lambda one: one.name == MANIFEST):  # run.json last: it says whose it is
            one.unlink()
        path.rmdir()
