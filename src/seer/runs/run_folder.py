# SPDX-License-Identifier: Apache-2.0
"""A run's folder and the names of the files in it.

run.json          what was asked for, and, once it is over, what it came to
prompts.jsonl     the prompts as they were given
results.jsonl     one response per line
events.jsonl      the event log (metrics/jsonl.py)
journal.jsonl     finished chunks, for --resume
instance-N.log    what each instance's process wrote
run.lock          held by the driver that writes here (run_lock.py); gone when it has ended
"""

from __future__ import annotations

import contextlib
import datetime
import os
import platform
import shutil
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgspec

from seer.errors import InputError
from seer.runs.run_lock import RunLock

MANIFEST = "run.json"
_HINT = "a run's folder is what `seer rollout` printed at its end"


@dataclass(frozen=True, slots=True)
class RunFolder:
    """Paths of one run."""

    path: Path

    @property
    def manifest(self) -> Path:
        """What was asked for and what it came to."""
        return self.path / MANIFEST

    @property
    def prompts(self) -> Path:
        """A copy of the prompts file."""
        return self.path / "prompts.jsonl"

    @property
    def results(self) -> Path:
        """One response per line."""
        return self.path / "results.jsonl"

    @property
    def events(self) -> Path:
        """The event log."""
        return self.path / "events.jsonl"

    @property
    def journal(self) -> Path:
        """Finished chunks."""
        return self.path / "journal.jsonl"

    @property
    def lock(self) -> Path:
        """Held by the driver that writes here."""
        return self.path / "run.lock"

    @property
    def report(self) -> Path:
        """The HTML page that `seer report` makes."""
        return self.path / "report.html"

    @property
    def trace(self) -> Path:
        """The Perfetto trace that `seer report` makes."""
        return self.path / "trace.json"

    @property
    def written(self) -> tuple[Path, ...]:
        """The files that a run writes, and so replaces."""
        return self.manifest, self.prompts, self.results, self.events, self.journal

    @classmethod
    def choose(cls, path: Path | None) -> RunFolder:
        """The folder at a path, or else runs/<date and time>; nothing is written yet."""
        if path is not None:
            return cls(path)
        moment = datetime.datetime.now().strftime("%Y%m%d-%H%M%S")
        path, serial = Path("runs") / moment, 1
        while path.exists():
            serial += 1
            path = Path("runs") / f"{moment}.{serial}"
        return cls(path)

    def create(self, prompts: Path | None = None) -> None:
        """Make the folder and copy the prompts into it."""
        self.path.mkdir(parents=True, exist_ok=True)
        if prompts is not None and prompts.resolve() != self.prompts.resolve():
            shutil.copyfile(prompts, self.prompts)

    @contextlib.contextmanager
    def held(self) -> Iterator[None]:
        """Keep every other driver out; the folder is made for that, and removed if nothing was written to it."""
        is_new = not self.path.exists()
        try:
            self.path.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise InputError(f"{self.path} cannot be made: {error.strerror}", hint="--run-dir DIR") from None
        try:
            with RunLock(self.lock, what=self.path):
                yield
        finally:
            if is_new:
                with contextlib.suppress(OSError):  # it is not empty
                    self.path.rmdir()

    @classmethod
    def find(cls, path: Path) -> RunFolder:
        """The folder of an earlier run; refused if the path holds none."""
        if not (path / MANIFEST).is_file():
            raise InputError(f"{path} holds no {MANIFEST}", hint=_HINT)
        return cls(path)

    def write_manifest(self, content: dict[str, Any]) -> None:
        """Write run.json and move it into place, so that a reader never sees half of it."""
        partial = self.manifest.with_suffix(".partial")
        try:
            partial.write_bytes(msgspec.json.format(msgspec.json.encode(content), indent=2) + b"\n")
            partial.replace(self.manifest)
        except OSError:
            partial.unlink(missing_ok=True)
            raise

    def read_manifest(self) -> dict[str, Any]:
        """What run.json says."""
        try:
            content: dict[str, Any] = msgspec.json.decode(self.manifest.read_bytes(), type=dict[str, Any])
        except (OSError, msgspec.DecodeError) as error:
            raise InputError(f"{self.manifest} cannot be read: {error}", hint=_HINT) from None
        return content


def machine() -> dict[str, Any]:
    """The machine that a run was measured on."""
    return {
        "cpu": _cpu_name(),
        "cores": len(os.sched_getaffinity(0)),
        "system": f"{platform.system()} {platform.release()}",
        "python": platform.python_version(),
    }


def _cpu_name() -> str:
    try:
        for line in Path("/proc/cpuinfo").read_text().splitlines():
            if line.startswith("model name"):
                return line.partition(":")[2].strip()
    except OSError:
        pass
    return platform.machine()
