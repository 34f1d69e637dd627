# SPDX-License-Identifier: Apache-2.0
"""What a run may not overwrite; asked before its first byte is written.

Rules
  1. A results path is a plain file or nothing, and is neither the prompts file nor another file of the run.
  2. A new run replaces no earlier run and no file, unless it is forced to.
  3. A resumed run replaces results only if all of them are in its journal, unless it is forced to.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path

from seer.errors import InputError
from seer.machine.given_files import RECORD_BYTES, read_given
from seer.runs.results import read_responses
from seer.runs.run_folder import RunFolder
from seer.types import Response, Restored


def refuse_impossible_out(out: Path, folder: RunFolder, prompts: Path | None) -> None:
    """Refuse a results path that no run can write to, forced or not."""
    if os.path.lexists(out) and not out.is_file():
        what = "a folder" if out.is_dir() else "not a plain file"
        raise InputError(f"results cannot be written to {out}: it is {what}", hint="--out FILE.jsonl")
    written = {"results": out, **{path.name: path for path in folder.written if path != folder.results}}
    for name, path in written.items():
        if prompts is not None and path != folder.prompts and _is_same(path, prompts):
            raise InputError(
                f"{path} is the prompts file, and the run's {name} would replace it", hint="choose another name"
            )
    for path in folder.written:
        if path != folder.results and _is_same(out, path):
            raise InputError(
                f"results cannot be written to {out}: the run keeps its {path.stem} there", hint="choose another name"
            )


def refuse_earlier_run(folder: RunFolder, prompts: Path | None) -> None:
    """Refuse a folder that holds files of a run or a comparison already."""
    kept = [path.name for path in folder.written if os.path.lexists(path) and not _is_worthless(path, folder, prompts)]
    kept += sorted(str(path.relative_to(folder.path)) for path in folder.path.glob(f"*/{folder.manifest.name}"))
    if kept:
        raise InputError(
            f"{folder.path} holds {', '.join(kept[:3])}{' and more' if len(kept) > 3 else ''} already",
            hint=f"choose another --run-dir, continue with --resume {folder.path}, or replace it with --force",
        )


def _is_worthless(path: Path, folder: RunFolder, prompts: Path | None) -> bool:
    """Whether nothing is lost with a file: the prompts themselves, or all that a run killed at its start leaves."""
    if path == folder.prompts and prompts is not None:
        return _is_same(path, prompts) or (path.is_file() and _content(path) == _content(prompts))
    is_started = folder.manifest.exists() or path != folder.journal
    return not is_started and path.is_file() and _content(path).count(b"\n") <= 1  # its first line, and no chunk


def _content(path: Path) -> bytes:
    return read_given(path, limit_bytes=RECORD_BYTES, may_be_pipe=True)


def refuse_existing_out(out: Path) -> None:
    """Refuse a results path that names a file already."""
    if os.path.lexists(out):
        raise InputError(f"{out} exists already", hint="choose another --out, or replace it with --force")


def refuse_unknown_results(out: Path, past: Mapping[tuple[int, int], Restored]) -> None:
    """Refuse to replace results that the journal of the resumed run would not bring back."""
    if not out.exists():
        return
    for response in read_responses(out):
        if not _is_in_journal(response, past):
            raise InputError(
                f"{out} holds response {response.index} of prompt {response.prompt_id!r}, and the journal does not",
                hint="keep a copy of the results; --force replaces them",
            )


def _is_in_journal(response: Response, past: Mapping[tuple[int, int], Restored]) -> bool:
    restored = past.get((response.group, response.index))
    if restored is None:
        return not response.is_complete
    ids = [token for span in restored.spans for token in span.ids]
    if response.is_complete:
        return list(response.token_ids) == ids[: len(response.token_ids)]
    return all(one == other for one, other in zip(response.token_ids, ids, strict=False))


def _is_same(one: Path, other: Path) -> bool:
    """Whether two paths name one file, by a link of any kind too."""
    if one.exists() and other.exists():
        return one.samefile(other)
    return one.resolve() == other.resolve()
