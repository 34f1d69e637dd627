# SPDX-License-Identifier: Apache-2.0
"""Files that a command writes where its user asked: `--out FILE`, `--json FILE`.

Rules
  1. A file that exists is replaced only by force, and this is asked before the command's work begins.
  2. A file is written whole, at the end of a link where the path is one. Devices, pipes and the command's own output
     are written to as they are.
"""

from __future__ import annotations

import errno
import os
import stat
import sys
from collections.abc import Iterable
from pathlib import Path

from seer.errors import InputError
from seer.machine.whole_files import write_whole


def refuse_output(out: Path, *, option: str, force: bool, never: Iterable[Path] = ()) -> None:
    """Refuse a path where a file would be lost, or where none can be written; `never` are not replaced by force
    either."""
    what: str | None = None
    if out.is_dir():
        what = "it is a folder"
    elif os.path.lexists(out) and not out.exists():
        what = "it is a link to nothing"
    elif not out.absolute().parent.is_dir():
        what = f"there is no folder {out.absolute().parent}"
    if what is not None:
        raise InputError(f"{option} {out} cannot be written: {what}", hint=f"{option} FILE")
    for kept in never:
        if out.exists() and kept.exists() and out.samefile(kept):
            raise InputError(f"{option} {out} would replace {kept.name} of the run", hint="choose another name")
    if out.exists() and not force and not _is_stream(out):
        raise InputError(f"{option} {out} exists already", hint=f"choose another {option}, or replace it with --force")


def write_output(out: Path, content: bytes, *, option: str) -> None:
    """Write what `refuse_output` has let pass."""
    try:
        if out.exists() and _is_stream(out):
            with os.fdopen(_opened(out), "wb") as stream:
                stream.write(content)
        else:
            write_whole(out.resolve(), content)
    except OSError as error:
        raise InputError(f"{option} {out} cannot be written: {error.strerror}", hint=f"{option} FILE") from None


def _opened(stream: Path) -> int:
    """A descriptor of what is no regular file; a pipe that nobody reads is refused, not waited for."""
    try:
        descriptor = os.open(stream, os.O_WRONLY | os.O_NONBLOCK | os.O_CLOEXEC)
    except OSError as error:
        if error.errno == errno.ENXIO:
            error.strerror = "nobody reads from it"
        raise
    os.set_blocking(descriptor, True)
    return descriptor


def _is_stream(out: Path) -> bool:
    """Whether nothing is lost by writing to a path: a device, a pipe, or /dev/stdout."""
    status = out.stat()
    if not stat.S_ISREG(status.st_mode):
        return True
    try:
        return os.path.samestat(status, os.fstat(sys.stdout.fileno()))
    except (OSError, ValueError):  # the output is no file
        return False
