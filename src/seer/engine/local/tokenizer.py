# SPDX-License-Identifier: Apache-2.0
"""Text to tokens and back, with the tokenizer and chat template of a model folder."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NoReturn

from jinja2 import TemplateError
from jinja2.sandbox import ImmutableSandboxedEnvironment
from tokenizers import Tokenizer as FastTokenizer

from seer.errors import InputError

Messages = Sequence[Mapping[str, str]]


class Tokenizer:
    """The tokenizer of a model folder."""

    def __init__(self, folder: Path) -> None:
        path = folder / "tokenizer.json"
        if not path.is_file():
            raise InputError(f"{folder} has no tokenizer.json", hint="give prompts as token ids instead")
        self._tokenizer = FastTokenizer.from_file(str(path))
        settings = _read_json(folder / "tokenizer_config.json")
        self._special = {key: _content(settings.get(key)) for key in ("bos_token", "eos_token", "pad_token")}
        template = folder / "chat_template.jinja"
        self._template = template.read_text() if template.is_file() else settings.get("chat_template")
        self._folder = folder

    @property
    def has_chat_template(self) -> bool:
        """Whether messages can be turned into a prompt."""
        return self._template is not None

    def encode(self, text: str) -> list[int]:
        """Tokens of a text. Special tokens in the text are recognised; none is added."""
        ids: list[int] = self._tokenizer.encode(text, add_special_tokens=False).ids
        return ids

    def decode(self, tokens: Sequence[int], *, skip_special: bool = True) -> str:
        """The text of tokens."""
        text: str = self._tokenizer.decode(list(tokens), skip_special_tokens=skip_special)
        return text

    def chat_text(self, messages: Messages) -> str:
        """The prompt for the assistant's next message, by the model's chat template."""
        if self._template is None:
            raise InputError(f"{self._folder} has no chat template", hint="give the prompt as plain text")
        environment = ImmutableSandboxedEnvironment(trim_blocks=True, lstrip_blocks=True)
        environment.globals["raise_exception"] = _refuse
        try:
            template = environment.from_string(self._template)
            return template.render(messages=messages, add_generation_prompt=True, **self._special)
        except TemplateError as error:
            raise InputError(f"the chat template of {self._folder} failed on the messages: {error}") from None

    def chat(self, messages: Messages) -> list[int]:
        """Tokens of `chat_text`."""
        return self.encode(self.chat_text(messages))


def _refuse(message: str) -> NoReturn:
    raise TemplateError(message)


def _read_json(path: Path) -> dict[str, Any]:
    if not path.is_file():
        return {}
    read: dict[str, Any] = json.loads(path.read_text())
    return read


def _content(token: Any) -> str | None:
    """A special token is given as a string, or as an object with `content`."""
    return token.get("content") if isinstance(token, dict) else token
