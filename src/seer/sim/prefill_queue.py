# SPDX-License-Identifier: Apache-2.0
"""The requests of a simulated instance whose context is being computed.

Requests are prefilled in pieces: the first requests of the queue whose contexts fit into one step's room form a piece,
and all of them start to decode when the piece is done. A context that exceeds the room is a piece by itself and takes
several steps.

Invariants
  1. At most one piece is in progress, and it is the head of the queue.
  2. `context_tokens` is the sum of the contexts of all queued requests: their KV is reserved while they wait here.
"""

from __future__ import annotations

import math
from collections import deque

from seer.sim.chunk_run import ChunkRun


class PrefillQueue:
    """Queued requests in order of admission, and the piece in progress."""

    def __init__(self) -> None:
        self.queue: deque[ChunkRun] = deque()
        self.context_tokens = 0.0
        self.end_step = math.inf
        """The step at which the piece in progress ends; infinite without one."""
        self._num_in_piece = 0

    def __len__(self) -> int:
        return len(self.queue)

    def add(self, run: ChunkRun) -> None:
        """Append a request with `prefill` tokens to compute."""
        self.context_tokens += run.context
        self.queue.append(run)

    def remove(self, run: ChunkRun) -> None:
        """Take a request out before its end. The piece in progress is given up and started again."""
        self.queue.remove(run)
        self.context_tokens -= run.context
        self._end_piece()

    def start_piece(self, room: float, step: float) -> None:
        """Start the next piece now, if none is in progress; `room` is in tokens per step."""
        if not self.queue or self._num_in_piece:
            return
        total = 0
        for run in self.queue:
            if self._num_in_piece and total + run.prefill > room:
                break
            total += run.prefill
            self._num_in_piece += 1
        self.end_step = step + max(1.0, total / room)

    def finish_piece(self) -> list[ChunkRun]:
        """End the piece in progress and return its requests, which decode from now on."""
        done = [self.queue.popleft() for _ in range(self._num_in_piece)]
        for run in done:
            self.context_tokens -= run.context
        self._end_piece()
        return done

    def tokens_per_step(self, room: float) -> float:
        """Tokens that each step of the piece computes, rounded up to a power of two unless `room` is less.

        Rounded, so that step costs repeat and can be cached.
        """
        if not self._num_in_piece:
            return 0.0
        total = sum(self.queue[index].prefill for index in range(self._num_in_piece))
        return min(room, 2.0 ** math.ceil(math.log2(total)))

    def _end_piece(self) -> None:
        self._num_in_piece = 0
        self.end_step = math.inf
