# SPDX-License-Identifier: Apache-2.0
"""Responses that failed: counted as they come, and reported in the last lines of a command."""

from __future__ import annotations

import sys
from collections.abc import Iterable

from seer.types import FinishReason, Response


class Failures:
    """How many responses of a run failed, and why the first one did."""

    def __init__(self) -> None:
        self.num_responses = 0
        self.num_failed = 0
        self._first_error: str | None = None

    def count(self, responses: Iterable[Response]) -> None:
        """Count more responses."""
        for response in responses:
            self.num_responses += 1
            if response.finish_reason is FinishReason.FAILED:
                self.num_failed += 1
                self._first_error = self._first_error or response.error

    def report(self, *, hint: str) -> None:
        """Write to stderr what failed, if anything did."""
        if not self.num_failed:
            return
        reason = " ".join((self._first_error or "no reason was given").split())
        sys.stderr.write(
            f"error: {self.num_failed:,} of {self.num_responses:,} responses failed; the first: {reason}\n"
        )
        sys.stderr.write(f"hint: {hint}\n")
