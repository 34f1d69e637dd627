# SPDX-License-Identifier: Apache-2.0
"""Read recorded response lengths from a file: the workload `trace:FILE`.

    .npz              `lengths` (groups x samples), or `lengths` flat with `group_sizes`; `prompt_lengths` and
                      `max_tokens` where present
    .json, .json.gz   {"groups": [[1200, 900, ...], ...], "max_tokens": 16384}; groups may differ in size

Every number is checked here, so that a broken file gives one clear error and not a strange simulation.
"""

from __future__ import annotations

import gzip
import zlib
from dataclasses import dataclass
from pathlib import Path

import msgspec
import numpy as np
import numpy.typing as npt

from seer.errors import InputError
from seer.machine.given_files import read_given
from seer.machine.json_files import UNREADABLE
from seer.machine.npz_files import read_integers
from seer.machine.sizes import show_size
from seer.ranges import INT32_MAX, Count


class _JsonLengths(msgspec.Struct):
    groups: list[list[Count]]
    max_tokens: Count | None = None
    prompt_tokens: Count | None = None


MAX_BYTES = 1 << 30
"""Of an unpacked .json.gz: hundreds of millions of lengths."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RecordedLengths:
    """The lengths of one iteration."""

    groups: tuple[tuple[int, ...], ...]
    """Response lengths in tokens, by group."""
    max_tokens: int
    """The limit of the responses; the longest response where the file does not give one."""
    prompt_tokens: int | None = None
    """Mean prompt length; None where the file does not give it."""


def read_lengths(path: Path) -> RecordedLengths:
    """Read and check a file of recorded lengths, by its suffix."""
    if not path.is_file():
        raise InputError(f"there is no trace file {path}", hint="FILE is the path of an .npz, .json or .json.gz file")
    if path.suffix == ".npz":
        recorded = _read_npz(path)
    elif path.suffixes[-1:] == [".json"] or path.suffixes[-2:] == [".json", ".gz"]:
        recorded = _read_json(path)
    else:
        raise InputError(f"{path} is neither .npz, .json nor .json.gz", hint="convert it to one of these")
    _check(path, recorded)
    return recorded


def _read_json(path: Path) -> RecordedLengths:
    try:
        raw = _read_gzip(path) if path.suffix == ".gz" else read_given(path, limit_bytes=MAX_BYTES)
        content = msgspec.json.decode(raw, type=_JsonLengths)
    except (OSError, EOFError, zlib.error, *UNREADABLE) as error:
        raise InputError(
            f"{path}: {error}", hint='expected {"groups": [[1200, 900], [300, 450]], "max_tokens": 16384}'
        ) from error
    return RecordedLengths(
        groups=tuple(map(tuple, content.groups)),
        max_tokens=content.max_tokens or max(map(max, filter(None, content.groups)), default=0),
        prompt_tokens=content.prompt_tokens,
    )


def _read_gzip(path: Path) -> bytes:
    """Unpacked, up to a limit: a small file can unpack to more than the machine holds."""
    with gzip.open(path) as file:
        raw = file.read(MAX_BYTES + 1)
    if len(raw) > MAX_BYTES:
        raise InputError(f"{path} unpacks to more than {show_size(MAX_BYTES)}", hint="give a smaller trace")
    return raw


def _read_npz(path: Path) -> RecordedLengths:
    arrays = _load_arrays(path)
    lengths = arrays["lengths"]
    if "group_sizes" in arrays:
        sizes = arrays["group_sizes"]
        in_range = sizes.min(initial=1) >= 1 and sizes.max(initial=1) <= lengths.size
        if lengths.ndim != 1 or sizes.ndim != 1 or not in_range or int(sizes.sum()) != lengths.size:
            raise InputError(
                f"{path}: group_sizes (sum {int(sizes.sum())}) do not divide lengths (shape {lengths.shape})",
                hint="lengths holds one number per response, group after group",
            )
        rows = np.split(lengths, np.cumsum(sizes)[:-1])
    elif lengths.ndim == 2:
        rows = list(lengths)
    else:
        raise InputError(
            f"{path}: lengths has shape {lengths.shape}, expected (groups, samples)",
            hint="a flat array needs group_sizes",
        )
    groups = tuple(tuple(int(length) for length in row) for row in rows)
    prompts = arrays.get("prompt_lengths")
    mean_prompt = round(float(prompts.mean())) if prompts is not None and prompts.size else 0
    limit = arrays.get("max_tokens")
    return RecordedLengths(
        groups=groups,
        max_tokens=int(limit.max()) if limit is not None and limit.size else int(lengths.max(initial=0)),
        prompt_tokens=mean_prompt or None,
    )


def _load_arrays(path: Path) -> dict[str, npt.NDArray[np.int64]]:
    known = ("lengths", "group_sizes", "prompt_lengths", "max_tokens")
    arrays = read_integers(path, known, hint="write it with numpy.savez")
    if "lengths" not in arrays:
        raise InputError(f"{path} has no array `lengths`", hint="expected lengths, of shape (groups, samples)")
    return arrays


def _check(path: Path, recorded: RecordedLengths) -> None:
    if not recorded.groups:
        raise InputError(f"{path} has no groups", hint="record at least one")
    for number, row in enumerate(recorded.groups):
        if not row:
            raise InputError(f"{path}: group {number} is empty", hint="leave it out, or give it a response")
        if min(row) < 1:
            raise InputError(
                f"{path}: group {number} has a response of {min(row)} tokens",
                hint="every response has at least 1 token",
            )
        if max(row) > INT32_MAX:
            raise InputError(
                f"{path}: group {number} has a response of {max(row)} tokens", hint=f"at most {INT32_MAX:,}"
            )
        if max(row) > recorded.max_tokens:
            raise InputError(
                f"{path}: group {number} has a response of {max(row)} tokens, max_tokens is {recorded.max_tokens}",
                hint="raise max_tokens, or leave it out",
            )
