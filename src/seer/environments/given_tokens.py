# SPDX-License-Identifier: Apache-2.0
"""The tokens that stand between two turns of the model, from the messages of an environment.

The chat template is rendered over the whole conversation with a mark in place of the newest turn. What follows the mark
is what the template adds after it: the end of the assistant's message, the new messages, and the start of the next one.

Invariants
  1. Nothing that the model generated is tokenized again.
  2. Where the template ends a message with a special token and the model generated that token, the whole sequence
     equals the template's own encoding of the conversation, as far as the model's turns have the tokenizer's encoding.
"""

from __future__ import annotations

import operator
from collections.abc import Sequence
from typing import Any

from seer.engine.text_codec import ChatCodec, TextCodec
from seer.environments.base import Message
from seer.errors import InputError

_MARK = "seer-turn-5b3fc2"
"""No template changes it. Where a text has it, as code of a model may print it, it is made longer."""
_UNKNOWN_PROMPT: Message = {"role": "user", "content": "-"}
"""Stands for a prompt that was not given as messages: templates want a user to speak first."""


def given_tokens(
    codec: TextCodec | None,
    before: Sequence[Message],
    new: Sequence[Message],
    *,
    last_token: int,
    tools: Sequence[Message] | None = None,
) -> list[int]:
    """Tokens after a turn that ended with `last_token`; `before` are the messages before that turn."""
    if not isinstance(codec, ChatCodec):
        raise InputError("the model has no chat template for the environment's messages", hint="Reply(token_ids=...)")
    mark = _mark_beside(before, new)
    turn = {"role": "assistant", "content": mark}
    text = codec.chat_text([*(before or [_UNKNOWN_PROMPT]), turn, *map(_checked, new)], tools)
    _, found, after = text.rpartition(mark)
    if not found:
        raise InputError("the chat template leaves out the assistant's message", hint="Reply(token_ids=...)")
    ids = codec.encode(after)
    return ids[1:] if ids and ids[0] == last_token else ids


def checked_tokens(token_ids: Sequence[int], vocab_size: int | None) -> list[int]:
    """Token ids that an environment gave; refused if the model has no such tokens."""
    ids = [operator.index(token) for token in token_ids]
    if min(ids) < 0 or (vocab_size is not None and max(ids) >= vocab_size):
        raise InputError(f"it gave token ids from {min(ids)} to {max(ids)}", hint=f"use 0 to {(vocab_size or 0) - 1}")
    return ids


def _mark_beside(*messages: Sequence[Message]) -> str:
    """A mark that is in none of these messages."""
    texts, mark = repr(messages), _MARK
    while mark in texts:
        mark += "-0"
    return mark


def _checked(message: Any) -> Message:
    if not isinstance(message, dict) or "role" not in message:
        raise InputError(f"it answered with {message!r:.200}, which is no message with a role")
    return message
