# SPDX-License-Identifier: Apache-2.0
"""Text to tokens and back, with the tokenizer and chat template of a model folder."""

from __future__ import annotations

import functools
import json
from collections.abc import Callable, Mapping, Sequence
from datetime import datetime
from functools import cached_property
from pathlib import Path
from typing import Any, NoReturn

from jinja2 import Template, TemplateError
from jinja2.ext import loopcontrols
from jinja2.sandbox import ImmutableSandboxedEnvironment
from tokenizers import Tokenizer as FastTokenizer

from seer.engine.hub_files import NamedTemplate, SpecialToken, TokenizerFields
from seer.errors import InputError
from seer.machine.given_files import MODEL_JSON_BYTES, SETTINGS_BYTES, check_given, read_given
from seer.machine.json_files import read_struct

Messages = Sequence[Mapping[str, Any]]
LONG_TOKENS = 1024
"""Characters or tokens beyond which the library's calls for batches are used: they let other threads run."""


class Tokenizer:
    """The tokenizer of a model folder."""

    def __init__(
        self, folder: Path, *, template: str | None = None, variables: Mapping[str, Any] | None = None
    ) -> None:
        """`template` takes the place of the folder's chat template; `variables` are for every use of it."""
        path = folder / "tokenizer.json"
        if not path.exists():
            raise InputError(f"{folder} has no tokenizer.json", hint="give prompts as token ids instead")
        self._tokenizer = _read_tokenizer(path)
        settings_file = folder / "tokenizer_config.json"
        read = read_struct(settings_file, TokenizerFields) if settings_file.exists() else TokenizerFields()
        self._special = {key: _content(getattr(read, key)) for key in ("bos_token", "eos_token", "pad_token")}
        self._template = _read_template(folder, read.chat_template) if template is None else template
        self._variables = dict(variables or {})
        self._folder = folder

    @property
    def has_chat_template(self) -> bool:
        """Whether messages can be turned into a prompt."""
        return self._template is not None

    @cached_property
    def vocab_size(self) -> int:
        """Its token ids are below this; a model may have more."""
        return 1 + max(self._tokenizer.get_vocab(with_added_tokens=True).values(), default=0)

    @cached_property
    def max_token_chars(self) -> int:
        """Characters of the longest token as the vocabulary writes it, which is at least as long as its text."""
        return max(map(len, self._tokenizer.get_vocab(with_added_tokens=True)), default=1)

    def encode(self, text: str, *, add_special: bool = False) -> list[int]:
        """Tokens of a text. Special tokens in the text are recognised; none is added unless told."""
        if len(text) <= LONG_TOKENS:
            ids: list[int] = self._tokenizer.encode(text, add_special_tokens=add_special).ids
            return ids
        [encoded] = self._tokenizer.encode_batch_fast([text], add_special_tokens=add_special)
        return list(encoded.ids)

    def decode(self, tokens: Sequence[int], *, skip_special: bool = True) -> str:
        """The text of tokens."""
        if len(tokens) <= LONG_TOKENS:
            text: str = self._tokenizer.decode(list(tokens), skip_special_tokens=skip_special)
            return text
        [text] = self._tokenizer.decode_batch([list(tokens)], skip_special_tokens=skip_special)
        return text

    def chat_text(
        self,
        messages: Messages,
        tools: Sequence[Mapping[str, Any]] | None = None,
        variables: Mapping[str, Any] | None = None,
    ) -> str:
        """The prompt for the assistant's next message, by the model's chat template."""
        try:
            own = {"messages": messages, "tools": tools, "add_generation_prompt": True}
            return self._compiled.render({**self._variables, **(variables or {}), **self._special, **own})
        except InputError:
            raise
        except Exception as error:  # a template is a program: it can fail in any way
            raise InputError(f"the chat template of {self._folder} failed on the messages: {error}") from None

    @cached_property
    def _compiled(self) -> Template:
        """The template in the surroundings that transformers gives it."""
        if self._template is None:
            raise InputError(f"{self._folder} has no chat template", hint="give the prompt as plain text")
        environment = ImmutableSandboxedEnvironment(trim_blocks=True, lstrip_blocks=True, extensions=[loopcontrols])
        environment.globals["raise_exception"] = _refuse
        environment.globals["strftime_now"] = lambda form: datetime.now().strftime(form)
        environment.filters["tojson"] = _as_json  # Jinja's own writes for HTML
        return environment.from_string(self._template)

    def chat(
        self,
        messages: Messages,
        *,
        tools: Sequence[Mapping[str, Any]] | None = None,
        variables: Mapping[str, Any] | None = None,
    ) -> list[int]:
        """Tokens of `chat_text`."""
        return self.encode(self.chat_text(messages, tools, variables))


@functools.cache
def decoder(folder: Path) -> Callable[[Sequence[int]], str]:
    """Decodes tokens with the tokenizer of a model folder, special ones as their text."""
    return functools.partial(Tokenizer(folder).decode, skip_special=False)


def _as_json(value: Any, ensure_ascii: bool = False, indent: int | None = None, **options: Any) -> str:
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, **options)


def _refuse(message: str) -> NoReturn:
    raise TemplateError(message)


def _read_tokenizer(path: Path) -> FastTokenizer:
    try:
        return FastTokenizer.from_file(str(check_given(path, limit_bytes=MODEL_JSON_BYTES)))
    except BaseException as error:  # the Rust library raises plain exceptions, and panics that are none
        if isinstance(error, KeyboardInterrupt | SystemExit | MemoryError | InputError):
            raise
        raise InputError(f"{path} is not a tokenizer: {error}", hint="download the folder again") from None


def _read_template(folder: Path, configured: str | list[NamedTemplate] | None) -> str | None:
    """chat_template.jinja, or what tokenizer_config.json says; of several templates the default one."""
    path = folder / "chat_template.jinja"
    if path.exists():
        try:
            return read_given(path, limit_bytes=SETTINGS_BYTES).decode()
        except (OSError, UnicodeDecodeError) as error:
            raise InputError(f"{path} cannot be read: {error}") from None
    if isinstance(configured, list):
        return next((one.template for one in configured if one.name == "default"), None)
    return configured


def _content(token: str | SpecialToken | None) -> str | None:
    """A special token is given as a string, or as an object with `content`."""
    return token.content if isinstance(token, SpecialToken) else token
