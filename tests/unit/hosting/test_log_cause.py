# SPDX-License-Identifier: Apache-2.0
"""The error that ended a process, found in what its processes wrote."""

from __future__ import annotations

import pytest

from seer.hosting.log_cause import MOST_CHARS, root_error

VLLM = """\
(Worker pid=7) ERROR 11-19 13:29:13 [multiproc_executor.py:1063] Traceback (most recent call last):
(Worker pid=7) ERROR 11-19 13:29:13 [multiproc_executor.py:1063]     return self._op(*args, **kwargs)
(Worker pid=7) ERROR 11-19 13:29:13 [multiproc_executor.py:1063] RuntimeError: Unsupported CPU attention: head_dim=16
(EngineCore pid=6) ERROR 11-19 13:29:13 [core.py:900] EngineCore encountered a fatal error.
vllm.v1.engine.exceptions.EngineDeadError: EngineCore encountered an issue. See stack trace (above) for the root cause.
Exception ignored in: <function ShmRingBuffer.__del__ at 0x7fb02e212840>
Traceback (most recent call last):
FileNotFoundError: [Errno 2] No such file or directory: '/psm_53d730febb04a8b1_b8d28de1'
"""


def test_the_error_of_a_worker_is_found_behind_those_that_point_to_it() -> None:
    assert root_error(VLLM) == "RuntimeError: Unsupported CPU attention: head_dim=16"


@pytest.mark.parametrize(
    ("log", "expected"),
    [
        ("", None),
        ("INFO ready\nWARNING: slow", None),
        ("ValueError: one\n\nDuring handling of it:\ntorch.OutOfMemoryError: two", "torch.OutOfMemoryError: two"),
        ("Exception ignored in: <function f>\nOSError: late", None),
        ("OSError: first\nException ignored in: <function f>\nOSError: late\nKeyError: 'x'", "KeyError: 'x'"),
        ("Error: a word of a program", None),
        ("OSError: old\nValueError: top_p must be above 0", "ValueError: top_p must be above 0"),
        ("OSError: it\nRuntimeError: Worker failed, please check the stack trace above for details", "OSError: it"),
        ("a.b" * 100_000 + "\nOSError: it\nValueError: " + "see " * 100_000 + "above", "OSError: it"),
    ],
)
def test_other_logs(log: str, expected: str | None) -> None:
    assert root_error(log) == expected


def test_a_long_error_is_cut() -> None:
    assert len(root_error("ValueError: " + "x" * 10_000) or "") == MOST_CHARS
