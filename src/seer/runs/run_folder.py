# SPDX-License-Identifier: Apache-2.0
"""A run's folder and the names of the files in it.

run.json          what was asked for, and, once it is over, what it came to
prompts.jsonl     the prompts as they were given
results.jsonl     one response per line
events.jsonl      the event log (metrics/jsonl.py), of a resumed run that of its last part
events.N.jsonl    those of the parts before it, the first one 1
journal.jsonl     finished chunks, for --resume
instance-N.log    what each instance's process wrote
run.lock          held by the driver that writes here (run_lock.py); gone when it has ended
"""

from __future__ import annotations

import contextlib
import datetime
import itertools
import os
import platform
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgspec

from seer.errors import InputError
from seer.machine.given_files import RECORD_BYTES, SETTINGS_BYTES, read_given
from seer.machine.json_files import UNREADABLE
from seer.machine.whole_files import write_whole
from seer.runs.manifest import Manifest
from seer.runs.run_lock import RunLock

MANIFEST = "run.json"
_HINT = "a run's folder is what `seer rollout` printed at its end"
_HINT_SIMULATION = "it is of a simulation: plots and trace.json are there, and `seer replay` takes its events.jsonl"
_SIMULATED = "finish_times.svg"  # report/simulation_folder.py


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
    def earlier_events(self) -> list[Path]:
        """The event logs of the parts before the last, in order."""
        return list(itertools.takewhile(Path.exists, (self.path / f"events.{n}.jsonl" for n in itertools.count(1))))

    def keep_events(self) -> None:
        """The run goes on: what its log says of the part that has ended stays."""
        if self.events.exists():
            self.events.rename(self.path / f"events.{len(self.earlier_events) + 1}.jsonl")

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
            write_whole(self.prompts, read_given(prompts, limit_bytes=RECORD_BYTES, may_be_pipe=True))

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
            hint = _HINT
            if (path / "journal.jsonl").is_file():
                hint = "its run was killed before it began: start it again"
            elif (path / _SIMULATED).is_file() or (path.parent / _SIMULATED).is_file():
                hint = _HINT_SIMULATION
            raise InputError(f"{path} holds no {MANIFEST}", hint=hint)
        return cls(path)

    def write_manifest(self, content: dict[str, Any]) -> None:
        """Write run.json; a reader never sees half of it."""
        try:
            encoded = msgspec.json.encode(content)
        except UnicodeEncodeError as error:
            raise InputError(f"a name that is not UTF-8 cannot be kept: {error.object!r}", hint="rename it") from None
        write_whole(self.manifest, msgspec.json.format(encoded, indent=2) + b"\n")

    def read_manifest(self) -> dict[str, Any]:
        """What run.json says, to be written again with changes; its fields have the types of `Manifest`."""
        try:
            content: dict[str, Any] = msgspec.json.decode(
                read_given(self.manifest, limit_bytes=SETTINGS_BYTES), type=dict[str, Any]
            )
            msgspec.convert(content, Manifest)
        except (OSError, *UNREADABLE) as error:
            raise InputError(f"{self.manifest} cannot be read: {error}", hint=_HINT) from None
        return content

    def read_facts(self) -> Manifest:
        """What run.json says."""
        return msgspec.convert(self.read_manifest(), Manifest)


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
