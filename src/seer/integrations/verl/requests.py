# SPDX-License-Identifier: Apache-2.0
"""What an agent loop asks the driver for, and what it gets; one Ray call each."""

from __future__ import annotations

import msgspec

from seer.types import Sampling


class Opening(msgspec.Struct, frozen=True):
    """How a conversation with the run's environment begins, packed: requests of one group are compared as a whole."""

    messages: bytes
    """Of the prompt."""
    row: bytes
    """The other columns of the dataset's row."""


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
    opening: Opening | None = None
    """The response is a whole conversation with the run's environment; None: one turn."""


class Generated(msgspec.Struct, frozen=True, kw_only=True):
    """One response that ended by itself, or was cancelled."""

    token_ids: list[int]
    logprobs: list[float]
    is_cancelled: bool
    weights_version: int
    num_chunks: int
    num_migrations: int
    talk: Talk | None = None
    """With an environment."""


class Talk(msgspec.Struct, frozen=True, kw_only=True):
    """What a conversation was, beside its tokens."""

    loss_mask: list[int]
    """1 for what the model generated; 0 for what the environment gave, and for all of a failed one."""
    reward: float | None
    """None: the environment gave none, so verl's reward function is asked."""
    num_turns: int
    """Generated and given ones."""
    tool_s: float
    """In calls of the environment."""
