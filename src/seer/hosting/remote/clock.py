# SPDX-License-Identifier: Apache-2.0
"""How the monotonic clock of another machine differs from ours, measured by a few round trips.

Pure: the caller passes the times in.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

Probe = tuple[float, float, float]
"""Our time when we asked, the other's time, our time when the answer came; in seconds."""


@dataclass(frozen=True, slots=True)
class ClockOffset:
    """What to subtract from the other machine's times to get ours."""

    offset_s: float = 0.0
    uncertainty_s: float = 0.0
    """The true offset is within this: half of the round trip."""

    def to_ours(self, t_s: float) -> float:
        """A time of the other machine on our clock."""
        return t_s - self.offset_s


def offset_of(probes: Sequence[Probe]) -> ClockOffset:
    """The offset by the fastest probe; none where it is within the uncertainty, as on one machine."""
    asked_s, theirs_s, answered_s = min(probes, key=lambda probe: probe[2] - probe[0])
    uncertainty_s = (answered_s - asked_s) / 2
    offset_s = theirs_s - (asked_s + answered_s) / 2
    return ClockOffset(offset_s if abs(offset_s) > uncertainty_s else 0.0, uncertainty_s)
