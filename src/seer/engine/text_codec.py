# SPDX-License-Identifier: Apache-2.0
"""The tokenizer protocol: text and messages to tokens and back."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Protocol, runtime_checkable


class TextCodec(Protocol):
    """Encodes text and messages, and decodes tokens."""

    def encode(self, text: str) -> list[int]:
        """Tokens of a text; no special tokens are added."""

    def chat(
        self,
        messages: Sequence[Mapping[str, Any]],
        *,
        tools: Sequence[Mapping[str, Any]] | None = None,
        variables: Mapping[str, Any] | None = None,
    ) -> list[int]:
        """Tokens of a conversation, up to where the model's answer starts. `tools` and `variables` are for the chat
        template.
        """

    def decode(self, tokens: Sequence[int]) -> str:
        """The text of tokens."""


@runtime_checkable
class ChatCodec(TextCodec, Protocol):
    """A codec that also shows what its chat template makes of messages, and has a bound on the length of texts."""

    @property
    def max_token_chars(self) -> int:
        """No token stands for more characters than this."""

    def encode(self, text: str, *, add_special: bool = False) -> list[int]:
        """Tokens of a text. `add_special`: with those that the tokenizer puts around every text."""

    def decode(self, tokens: Sequence[int], *, skip_special: bool = True) -> str:
        """The text of tokens, without that of special ones unless told otherwise."""

    def chat_text(
        self,
        messages: Sequence[Mapping[str, Any]],
        tools: Sequence[Mapping[str, Any]] | None = None,
        variables: Mapping[str, Any] | None = None,
    ) -> str:
        """The conversation as text, up to where the model's answer starts."""
