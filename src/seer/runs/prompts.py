# SPDX-License-Identifier: Apache-2.0
"""Prompts from a file or from Python, all checked before anything heavy is loaded.

A file has one JSON object per line, with exactly one of

    {"prompt": "text"}                     taken as it is, no template
    {"messages": [{"role": ..., ...}]}     turned into a prompt by the model's chat template; also under `prompt`
    {"prompt_token_ids": [1, 2, 3]}

and optionally `id` (else the line number), `n`, `seed`, `priority`, and any sampling setting (`max_tokens`,
`temperature`, ...).

All problems are reported at once, each with its line number. Those that need a tokenizer to find (a prompt that is too
long once encoded) are reported by `encode`, in the same form.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from seer.engine.text_codec import TextCodec
from seer.errors import InputError, SeerError
from seer.machine.given_files import RECORD_BYTES, read_given
from seer.ranges import Responses, check
from seer.runs.encoded_check import most_responses, refuse_surrogates, refuse_unfit
from seer.runs.prompt_lines import Messages, Prompt, PromptInput, from_value, read_line
from seer.types import Sampling

if TYPE_CHECKING:
    from seer.config import RunConfig
    from seer.engine.prepare import PreparedEngine

__all__ = [
    "BadPrompt",
    "BadPrompts",
    "EncodedPrompt",
    "Messages",
    "Prompt",
    "PromptInput",
    "as_prompts",
    "encode",
    "encode_for",
    "read_prompts",
    "refuse",
]

MAX_SHOWN = 20
"""Bad prompts that an error lists: more would not fit a screen."""


@dataclass(frozen=True, slots=True)
class BadPrompt:
    """A prompt that cannot be run, and why."""

    where: str
    why: str

    def __str__(self) -> str:
        return f"{self.where}: {self.why}"


class BadPrompts(InputError):  # noqa: N818 - reads as what it is
    """Prompts that cannot be run; the message lists them."""

    def __init__(self, bad: Sequence[BadPrompt]) -> None:
        shown = "; ".join(map(str, bad[:MAX_SHOWN]))
        more = f"; and {len(bad) - MAX_SHOWN} more" if len(bad) > MAX_SHOWN else ""
        super().__init__(f"{len(bad)} bad prompts: {shown}{more}", hint="correct them, or leave them out")
        self.bad = bad


@dataclass(frozen=True, slots=True)
class EncodedPrompt:
    """A prompt as tokens, with the sampling and the number of responses it gets."""

    prompt: Prompt
    token_ids: tuple[int, ...]
    sampling: Sampling
    n: int


def read_prompts(path: Path) -> tuple[list[Prompt], list[BadPrompt]]:
    """The good prompts of a file and the bad ones, both in the file's order."""
    try:
        content = read_given(path, limit_bytes=RECORD_BYTES, may_be_pipe=True)
        lines = content.split(b"\n")  # a text may hold other characters that Python takes for line ends
    except (OSError, ValueError) as error:  # ValueError: a NUL in the path
        raise InputError(
            f"{path} cannot be read: {error}", hint="--prompts FILE.jsonl, one JSON object per line"
        ) from None
    good: list[Prompt] = []
    bad: list[BadPrompt] = []
    seen: dict[str, int] = {}
    for number, line in enumerate(lines, 1):
        if not line.strip():
            continue
        try:
            prompt = read_line(line, number)
            if prompt.id in seen:
                raise InputError(f"id {prompt.id!r} was used on line {seen[prompt.id]}")
        except InputError as error:
            bad.append(BadPrompt(f"line {number}", str(error)))
            continue
        seen[prompt.id] = number
        good.append(prompt)
    if not good and not bad:
        raise InputError(f"{path} holds no prompt", hint='a line looks like {"prompt": "..."}')
    return good, bad


def as_prompts(given: Iterable[PromptInput | EncodedPrompt], *, first: int = 0) -> list[Prompt | EncodedPrompt]:
    """Prompts given in Python: texts, conversations, token ids, objects as in a file, or `Prompt`s; all problems in one
    error. Those without an id get their position, the first of them `first`. An iterator without end is refused once it
    has given more than a run can have.
    """
    most = most_responses()
    prompts: list[Prompt | EncodedPrompt] = []
    bad: list[BadPrompt] = []
    for position, item in enumerate(given, first):
        if position - first == most:
            raise InputError(
                f"more than {most:,} prompts, and this machine has memory for the state of about as many responses",
                hint="enough_groups=... takes prompts from an iterator as they are needed",
            )
        try:
            prompts.append(item if isinstance(item, EncodedPrompt) else from_value(item, str(position)))
        except InputError as error:
            bad.append(BadPrompt(f"prompt {position}", str(error)))
    refuse(bad)
    return prompts


def encode_for(
    prompts: Iterable[Prompt | EncodedPrompt], config: RunConfig, engine: PreparedEngine
) -> tuple[list[EncodedPrompt], list[BadPrompt]]:
    """`encode` with a run's settings and its model."""
    return encode(
        prompts,
        engine.codec,
        n=config.n,
        sampling=config.sampling,
        max_model_len=engine.max_model_len,
        vocab_size=engine.vocab_size,
        refuse_sampling=engine.refuse_sampling,
    )


def encode(
    prompts: Iterable[Prompt | EncodedPrompt],
    codec: TextCodec | None,
    *,
    n: int,
    sampling: Sampling,
    max_model_len: int,
    vocab_size: int | None = None,
    tools: Sequence[Mapping[str, Any]] | None = None,
    first: int = 0,
    refuse_sampling: Callable[[Sampling], None] | None = None,
) -> tuple[list[EncodedPrompt], list[BadPrompt]]:
    """Turn prompts into tokens and settle their sampling; those that cannot run come back as bad.

    Prompts that are encoded already keep their place and are checked too. Without `vocab_size` the model's vocabulary
    is not known, and token ids are not held against it. `tools` are schemas for the chat template. `first` is the
    position of the first of them. `refuse_sampling` raises for what the engine cannot sample.
    """
    n = check(n, Responses, "n")
    if refuse_sampling is not None:
        refuse_sampling(sampling)  # once, and not for every prompt
    good: list[EncodedPrompt] = []
    bad: list[BadPrompt] = []
    for position, given in enumerate(prompts, first):
        prompt = given.prompt if isinstance(given, EncodedPrompt) else given
        try:
            encoded = given if isinstance(given, EncodedPrompt) else _encode(given, codec, n, sampling, tools)
            refuse_unfit(
                encoded,
                max_model_len=max_model_len,
                vocab_size=vocab_size,
                has_text=codec is not None,
                refuse_sampling=refuse_sampling,
            )
            good.append(encoded)
        except SeerError as error:
            where = f"line {prompt.line}" if prompt.line is not None else f"prompt {position}"
            bad.append(BadPrompt(where, str(error)))
    return good, bad


def refuse(bad: Sequence[BadPrompt]) -> None:
    """Raise one error that lists every bad prompt; nothing if there is none."""
    if bad:
        raise BadPrompts(bad)


def _encode(
    prompt: Prompt,
    codec: TextCodec | None,
    n: int,
    sampling: Sampling,
    tools: Sequence[Mapping[str, Any]] | None,
) -> EncodedPrompt:
    if prompt.token_ids is not None:
        ids = prompt.token_ids
    elif codec is None:
        raise InputError("the model has no tokenizer; give prompt_token_ids")
    elif prompt.messages is not None:
        for message in prompt.messages:
            refuse_surrogates(message["content"], "message")
        ids = tuple(codec.chat(prompt.messages, tools=tools))
    else:
        assert prompt.text is not None, f"prompt {prompt.id} has no content"
        refuse_surrogates(prompt.text, "prompt")
        ids = tuple(codec.encode(prompt.text))
    return EncodedPrompt(prompt, ids, prompt.sampling_over(sampling), prompt.n if prompt.n is not None else n)
