# SPDX-License-Identifier: Apache-2.0
"""What the server needs of the model it serves: a session, the tokenizer and limits, and its instances' pauses."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from seer.engine.base import Instance
from seer.engine.text_codec import ChatCodec
from seer.errors import InputError, InstanceError
from seer.metrics.fleet_sample import FleetSample
from seer.runs.session import Session
from seer.serve.live import LivePage


@dataclass(frozen=True, slots=True, kw_only=True)
class Backend:
    """A model that is served."""

    name: str
    """As clients call it."""
    session: Session
    instances: Sequence[Instance]
    codec: ChatCodec | None
    """The tokenizer; None: token ids only."""
    live: LivePage
    """Gets the session's events."""
    sample: Callable[[], FleetSample]
    """The fleet's state, when asked for."""

    @property
    def max_model_len(self) -> int:
        """Longest prompt plus response: what the model's context and an instance's KV memory both allow."""
        return self.session.longest_request_tokens

    @property
    def weights_version(self) -> int:
        """Version of the weights."""
        return self.session.weights_version

    async def pause(self) -> None:
        """Freeze what runs, for as long as it takes. An instance that is lost has nothing to freeze."""
        self.session.freeze(True)
        results = await asyncio.gather(*(one.pause() for one in self.instances), return_exceptions=True)
        _raise_other(results)

    async def resume(self) -> None:
        """Let what was frozen go on."""
        results = await asyncio.gather(*(one.resume() for one in self.instances), return_exceptions=True)
        self.session.freeze(False)
        _raise_other(results)


def require_codec(backend: Backend) -> ChatCodec:
    """The tokenizer, or an error that says to use token ids."""
    if backend.codec is None:
        raise InputError("the model has no tokenizer", hint="give the prompt as token ids")
    return backend.codec


def _raise_other(results: Sequence[BaseException | None]) -> None:
    """Raise the first error that is not the loss of an instance."""
    for result in results:
        if result is not None and not isinstance(result, InstanceError):
            raise result
