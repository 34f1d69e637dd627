# SPDX-License-Identifier: Apache-2.0
"""What an agent loop asks the driver for, and what it gets; one Ray call each."""

from __future__ import annotations

import msgspec

from seer.types import Sampling


class GenerateRequest(msgspec.Struct, frozen=True, kw_only=True):
    """One response."""

    group: str
    """verl's uid of the prompt."""
    num_siblings: int
    """Responses of its group that are probably asked for at once, this one included."""
    prompt: tuple[int, ...]
    """A later turn sends the whole history."""
    sampling: Sampling
    request_id: str = ""
    """verl's name of the conversation: the same for all its turns."""


class Generated(msgspec.Struct, frozen=True, kw_only=True):
    """One response that ended by itself, or was cancelled."""

    token_ids: list[int]
    logprobs: list[float]
    is_cancelled: bool
    weights_version: int
    num_chunks: int
    num_migrations: int
