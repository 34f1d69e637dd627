"""The tokenizer protocol: text and messages to tokens and back."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Protocol


class TextCodec(Protocol):
    """What encoding needs of a tokenizer."""

    def encode(self, text: str) -> list[int]:
        """Tokens of a text, nothing added."""

    def chat(self, messages: Sequence[Mapping[str, str]]) -> list[int]:
        """Tokens of a conversation, ready for the model's answer."""

    def decode(self, tokens: Sequence[int]) -> str:
        """The text of tokens."""
