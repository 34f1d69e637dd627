# SPDX-License-Identifier: Apache-2.0
"""Checks of what a Python program passes to `Rollout`: wrong kinds of values are refused by name, before any start.

Ranges of single numbers are in `seer.ranges`; what prompts may be is in prompt_lines.py and encoded_check.py.
"""

from __future__ import annotations

import inspect
import os
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any

from msgspec import Meta

from seer.environments.base import check_environment
from seer.errors import ConfigError, InputError
from seer.ranges import Count, CountOrZero, Seconds, TokenId, check
from seer.types import Sampling

VerifiedShare = Annotated[float, Meta(ge=0, le=1)]
"""Of the responses; 0 verifies none."""


def check_prompts(prompts: Any) -> None:
    """Refuse a single prompt, and what is no list at all."""
    if isinstance(prompts, str | bytes | Mapping) or not isinstance(prompts, Iterable):
        raise InputError(f"prompts is a {type(prompts).__name__}, not a list of prompts", hint='["one prompt", ...]')


def check_sampling(sampling: Any) -> None:
    """Refuse what is neither a `Sampling` nor None."""
    if sampling is not None and not isinstance(sampling, Sampling):
        raise ConfigError(f"sampling is a {type(sampling).__name__}", hint="Sampling(max_tokens=...)")


def check_run(
    *,
    scheduler: Any,
    length_hints: Any,
    events: Any,
    reward: Any = None,
    reward_deadline_s: Any = 60.0,
    lengths: Any = None,
    past_responses: Any = None,
    verify: Any = 0.0,
) -> None:
    """Refuse settings of a run or a session that are of a wrong kind or out of range."""
    check(reward_deadline_s, Seconds, "reward_deadline_s")
    check(verify, VerifiedShare, "verify")
    if scheduler is not None and not isinstance(scheduler, str):
        raise ConfigError(f"scheduler={scheduler!r} is no name", hint="scheduler='seer'")
    if reward is not None:
        _check_callable(reward, "reward", 2, "reward(prompt, response)")
    _check_callable(events, "events", 1, "events(event)")
    if lengths is not None:
        _check_rows(lengths, list[Count], "lengths", "lengths[prompt][index]")
    if length_hints is not None:
        _check_mapping(length_hints, "length_hints", "{prompt id: tokens}")
        for name, length in length_hints.items():
            check(length, CountOrZero, f"length_hints[{name!r}]")
    if past_responses is not None:
        _check_mapping(past_responses, "past_responses", "{prompt id: [token ids, ...]}")
        for name, rows in past_responses.items():
            _check_rows(rows, list[TokenId], f"past_responses[{name!r}]", "[token ids, ...]")


def check_submission(group: Any, on_tokens: Any, home: Any, num_instances: int) -> None:
    """Refuse what a session cannot take with a prompt; of instances that were removed `home` is one, too."""
    is_instance = isinstance(home, int) and not isinstance(home, bool) and 0 <= home < num_instances
    if home is not None and not is_instance:
        raise ConfigError(
            f"home={home!r}: there are instances 0 to {num_instances - 1}", hint="last_instance of an earlier response"
        )
    if group is not None and not isinstance(group, str):
        raise ConfigError(f"group is a {type(group).__name__}, not a name", hint="group='uid-1'")
    if group == "":
        raise ConfigError("group has no name", hint="leave it out for a group of its own")
    if on_tokens is not None:
        _check_callable(on_tokens, "on_tokens", 2, "on_tokens(handle, span)")


def check_ids(ids: Any) -> None:
    """Refuse what is no list of instances."""
    if not _is_list(ids):
        raise ConfigError(f"ids is a {type(ids).__name__}, not a list of instances", hint="[0, 1]")


def check_environment_calls(environment: Any, deadline_s: Any, tools: Any, max_context_tokens: Any) -> None:
    """Refuse an environment that cannot be called, and settings of it that are of a wrong kind."""
    if environment is not None:
        check_environment(environment)
    check(deadline_s, Seconds, "environment_deadline_s")
    if max_context_tokens is not None:
        check(max_context_tokens, Count, "max_context_tokens")
        if environment is None:
            raise ConfigError(
                f"max_context_tokens={max_context_tokens} is for an environment, and there is none",
                hint="max_tokens of the sampling bounds a response",
            )
    if tools is not None and not (_is_list(tools) and all(isinstance(tool, Mapping) for tool in tools)):
        raise ConfigError("tools is no list of schemas", hint="transformers.utils.get_json_schema makes them")


def check_choice(keep: Any, keep_deadline_s: Any, enough_groups: Any, on_response: Any) -> None:
    """Refuse what cannot choose groups."""
    check(keep_deadline_s, Seconds, "keep_deadline_s")
    if keep is not None:
        _check_callable(keep, "keep", 1, "keep(group)")
    if on_response is not None:
        _check_callable(on_response, "on_response", 1, "on_response(response)")
    if enough_groups is not None:
        check(enough_groups, Count, "enough_groups")


def check_journal(journal: Any, resume: Any) -> Path | None:
    """The journal's path; refused if it cannot be a file, or if there is none to resume."""
    if not isinstance(resume, bool):
        raise ConfigError(f"resume={resume!r}", hint="True or False")
    if journal is None:
        if resume:
            raise ConfigError("resume=True without a journal", hint="journal=Path(...)")
        return None
    if not isinstance(journal, str | os.PathLike):
        raise ConfigError(f"journal is a {type(journal).__name__}, not a path", hint="journal=Path(...)")
    path = Path(journal)
    if path.is_dir():
        raise InputError(f"journal {path} is a folder", hint="name a file")
    return path


def refuse_late_prompts(journal: Path | None, verify: float) -> None:
    """Refuse what needs to know all prompts where they come from an iterator."""
    if journal is not None or verify:
        raise ConfigError(
            f"{'a journal' if journal is not None else 'verify'} needs all prompts, and these come from an iterator",
            hint="give a list: with enough_groups only as many are started as are needed",
        )


def check_weights(weights: Any, keep_context: Any, *, is_read: bool) -> None:
    """Refuse what are no weights; `is_read` says whether the engine reads them at all."""
    if not isinstance(keep_context, bool):
        raise ConfigError(f"keep_context={keep_context!r}", hint="True or False")
    if isinstance(weights, Mapping):
        wrong = next((name for name, one in weights.items() if not hasattr(one, "nbytes")), None)
        if wrong is not None or not weights:
            what = "is empty" if wrong is None else f"holds a {type(weights[wrong]).__name__} as {wrong!r}"
            raise ConfigError(f"the mapping of weights {what}", hint="tensors by their Hugging Face names")
    elif not isinstance(weights, str | os.PathLike):
        raise ConfigError(f"weights is a {type(weights).__name__}", hint="a path, or tensors by name")
    elif is_read and not Path(weights).exists():
        raise InputError(f"there are no weights at {os.fspath(weights)!r}", hint="a model folder or a safetensors file")


def _check_callable(function: Any, name: str, num_arguments: int, form: str) -> None:
    if not callable(function):
        raise ConfigError(f"{name} is a {type(function).__name__}, not a function", hint=form)
    try:
        signature = inspect.signature(function)
    except (TypeError, ValueError):  # some built-in functions have none
        return
    try:
        signature.bind(*[None] * num_arguments)
    except TypeError as error:
        raise ConfigError(f"{name} cannot be called as {form}: {error}", hint=f"def {form}: ...") from None


def _check_mapping(value: Any, name: str, form: str) -> None:
    if not isinstance(value, Mapping):
        raise ConfigError(f"{name} is a {type(value).__name__}", hint=form)


def _check_rows(rows: Any, kind: Any, name: str, form: str) -> None:
    """Refuse what is not a list of rows of this kind."""
    if not _is_list(rows) or not all(_is_list(row) for row in rows):
        raise ConfigError(f"{name} is not a list of lists", hint=form)
    for position, row in enumerate(rows):
        check(list(row), kind, f"{name}[{position}]")


def _is_list(value: Any) -> bool:
    return isinstance(value, Sequence) and not isinstance(value, str | bytes)
