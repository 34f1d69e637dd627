# SPDX-License-Identifier: Apache-2.0
"""The status in run.json of a run that did not end by itself."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Iterator

from seer.errors import SeerError
from seer.runs.run_folder import RunFolder


@contextlib.contextmanager
def status_of_failure(folder: RunFolder) -> Iterator[None]:
    """Write how the run ended if an exception ends it. Only a killed driver leaves the status "running"."""
    try:
        yield
    except BaseException as error:
        was_cut = isinstance(error, KeyboardInterrupt | asyncio.CancelledError)
        outcome = {"status": "interrupted"} if was_cut else {"status": "failed", "error": str(error)}
        with contextlib.suppress(OSError, SeerError):  # the disk may be full: the error itself is more important
            folder.write_manifest(folder.read_manifest() | outcome)
        raise
