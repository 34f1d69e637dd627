# SPDX-License-Identifier: Apache-2.0
"""Verify a share of a run's responses while the run goes on, each as it ends.

Verifying runs in a process of its own with the lowest priority, so that it takes idle time of the cores first. The
responses to verify are chosen at random before the run, so the choice does not depend on what a response says.

Waits for                                    unblocked by
  the last answers (`finish`)                  the process, its death, deadline_s without an answer

Invariants
  1. A verification covers every chosen response that ended by itself; if one could not be verified, `finish` raises.
  2. After `close` the process has ended.
"""

from __future__ import annotations

import asyncio
import contextlib
import random
from collections.abc import Sequence
from pathlib import Path

import msgspec

from seer.errors import ConfigError, DeadlineExceeded, SeerError
from seer.hosting.channel import Channel
from seer.hosting.launch import ChildProcess
from seer.runs.prompts import EncodedPrompt
from seer.types import Response
from seer.verification.noise import Scoring
from seer.verification.verifier_process import Begin, Verified, Verify
from seer.verification.verify import SCORING, ResponseToVerify, Verification, add_up

CLOSE_DEADLINE_S = 5.0
"""Bounds the wait for a killed process, which normally ends at once."""

_decoder: msgspec.msgpack.Decoder[Verified] = msgspec.msgpack.Decoder(Verified)


class Verifier:
    """Verifies a share of one run's responses; made for each run."""

    def __init__(
        self,
        prompts: Sequence[EncodedPrompt],
        share: float,
        *,
        folder: Path,
        weights: Path | None,
        scoring: Scoring = SCORING,
        ends_ignored: bool,
        seed: int = 0,
        deadline_s: float = 600.0,
    ) -> None:
        if not 0 < share <= 1:
            raise ConfigError(f"a share of {share:g} of the responses to verify", hint="above 0 and at most 1")
        all_responses = [(group, index) for group, prompt in enumerate(prompts) for index in range(prompt.n)]
        self._chosen = set(random.Random(seed).sample(all_responses, max(1, round(share * len(all_responses)))))
        self._prompts = prompts
        self._begin = Begin(folder=str(folder), weights=None if weights is None else str(weights), scoring=scoring)
        self._ends_ignored = ends_ignored
        self._deadline_s = deadline_s
        self._child: ChildProcess | None = None
        self._channel: Channel[Verified] | None = None
        self._reader: asyncio.Task[None] | None = None
        self._parts: list[Verification] = []
        self._num_sent = 0
        self._error: str | None = None
        self._answered = asyncio.Event()

    @property
    def num_verified(self) -> int:
        """Responses verified so far."""
        return len(self._parts)

    @property
    def num_chosen(self) -> int:
        """Responses to verify if all of them end by themselves."""
        return len(self._chosen)

    async def start(self) -> None:
        """Launch the process; it reads the weights while the run begins."""
        self._child = ChildProcess("verifier", None, module="seer.verification.verifier_process", single_thread=True)
        self._channel = await Channel.over(self._child.socket, _decoder)
        self._channel.send(self._begin)
        self._reader = asyncio.create_task(self._read(self._channel))

    def consider(self, response: Response) -> None:
        """Verify a response that has ended, if it was chosen. Never waits."""
        if (response.group, response.index) not in self._chosen or not response.is_complete or not response.token_ids:
            return
        assert self._channel is not None, "responses come after start"
        prompt = self._prompts[response.group]
        self._num_sent += 1
        self._channel.send(Verify(ResponseToVerify(prompt.token_ids, prompt.sampling, response, self._ends_ignored)))

    async def finish(self) -> Verification | None:
        """Wait for the last answers and add them up; None if no chosen response ended by itself."""
        while len(self._parts) < self._num_sent and self._error is None:
            self._answered.clear()
            try:
                async with asyncio.timeout(self._deadline_s):
                    await self._answered.wait()
            except TimeoutError:
                what = f"verifying responses ({len(self._parts)} of {self._num_sent} done)"
                raise DeadlineExceeded(what, self._deadline_s) from None
        if self._error is not None:
            raise SeerError(f"the run could not be verified: {self._error}", hint="seer verify RUN tries again")
        return add_up(self._parts) if self._parts else None

    async def close(self) -> None:
        """Kill the process."""
        if self._reader is not None:
            self._reader.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await self._reader
        if self._channel is not None:
            await self._channel.close()
        child, self._child = self._child, None
        if child is not None:
            child.kill()
            await child.wait(CLOSE_DEADLINE_S)
            child.close()

    async def _read(self, channel: Channel[Verified]) -> None:
        while (message := await channel.receive()) is not None:
            if message.verification is None:
                self._error = message.error
            else:
                self._parts.append(message.verification)
            self._answered.set()
        if self._error is None:
            assert self._child is not None, "the reader ends before the child"
            await self._child.wait(CLOSE_DEADLINE_S)
            self._error = f"its process ended: {self._child.exit_cause()}"
        self._answered.set()
