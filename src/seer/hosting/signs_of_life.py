# SPDX-License-Identifier: Apache-2.0
"""When a process last gave a sign of life, and whether to give it up: for its silence, or for steps that do not come.

A message is one sign, a step of its engine the other. Heartbeats are messages, so a process whose engine hangs is not
silent: it is found by its steps.

Pure: times are passed in, as seconds of one clock.

Invariants
  1. Silence that is not the process's own does not count: while the reader was late, or the process waited for a core.
  2. A process that hangs in a loop waits for a core too, on a busy machine. It is found all the same, after ten times
     the deadline at the latest (`FORGIVEN_SHARE`).
  3. A process that has nothing to do need not step.
"""

from __future__ import annotations

FORGIVEN_SHARE = 0.9
"""Of a time in which a process got no core. The rest counts, so that invariant 2 holds."""


class SignsOfLife:
    """Of one instance's process; of the next one after `begin`."""

    def __init__(self, *, silence_deadline_s: float, progress_deadline_s: float) -> None:
        self.silence_deadline_s = silence_deadline_s
        self._progress_deadline_s = progress_deadline_s
        self._message_s = 0.0
        self._step_s = 0.0

    def begin(self, now_s: float) -> None:
        """A process is ready: both deadlines count from now on."""
        self._message_s = self._step_s = now_s

    def spoke(self, now_s: float) -> None:
        """A message has come."""
        self._message_s = now_s

    def stepped(self, now_s: float) -> None:
        """The engine has made a step, or had none to make until now."""
        self._step_s = now_s

    def silent_s(self, now_s: float) -> float:
        """Since its last message."""
        return now_s - self._message_s

    def forgive(self, *, late_s: float, waited_s: float) -> None:
        """Leave time out: by which its messages may have been read late, and in which it waited for a core."""
        forgiven_s = max(0.0, late_s, FORGIVEN_SHARE * waited_s)
        self._message_s += forgiven_s
        self._step_s += forgiven_s

    def why_lost(self, now_s: float, *, num_chunks: int) -> str | None:
        """Why to give it up; None while it lives. `num_chunks` are those that it should be stepping."""
        if self.silent_s(now_s) > self.silence_deadline_s:
            return f"no message from its process for {self.silence_deadline_s:g} s"
        if num_chunks and now_s - self._step_s > self._progress_deadline_s:
            return f"{num_chunks} chunks in flight, no step for {self._progress_deadline_s:g} s"
        return None
