# SPDX-License-Identifier: Apache-2.0
"""What stands between two turns, against transformers' own reading of the whole conversation."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

pytest.importorskip("transformers")

from chat_models import TEMPLATES, make_tokenizer
from seer.engine.local.tokenizer import Tokenizer
from seer.environments.base import End, Reply, settled
from seer.environments.given_tokens import _MARK, checked_tokens, given_tokens
from seer.errors import InputError

QUESTION = [{"role": "user", "content": "What is 7 * 6?"}]
TURNS = [
    ("I ask the calculator: 7*6 ", [{"role": "tool", "content": "42"}]),
    ("Once more <b>&", [{"role": "tool", "content": "  42\n\n"}, {"role": "user", "content": "well?"}]),
    ("42", [{"role": "user", "content": "Thanks, and ümlaut?"}]),
]
TOOLS = [
    {
        "type": "function",
        "function": {"name": "calculate", "description": "a < b & 'c'", "parameters": {"type": "object"}},
    }
]


def reference_ids(reference: Any, messages: list[Any], tools: Any = None) -> list[int]:
    ids = reference.apply_chat_template(messages, tools=tools, add_generation_prompt=True, return_dict=False)
    return list(ids)


@pytest.mark.parametrize("tools", [None, TOOLS])
@pytest.mark.parametrize("name", TEMPLATES)
def test_a_conversation_of_turns_has_the_tokens_of_transformers(name: str, tools: Any, tmp_path: Path) -> None:
    template, eos = TEMPLATES[name]
    reference = make_tokenizer(tmp_path, template, eos=eos)
    codec = Tokenizer(tmp_path)
    [end] = codec.encode(eos)
    messages: list[Any] = list(QUESTION)
    ids = codec.chat(messages, tools=tools)
    assert ids == reference_ids(reference, messages, tools)
    for text, answered in TURNS:
        generated = [*codec.encode(text.strip()), end]  # templates that trim change what is not in this form
        given = given_tokens(codec, messages, answered, last_token=end, tools=tools)
        ids = [*ids, *generated, *given]
        messages += [{"role": "assistant", "content": text.strip()}, *answered]
        assert ids == reference_ids(reference, messages, tools)


def test_a_turn_that_did_not_end_with_the_templates_token_is_ended(tmp_path: Path) -> None:
    make_tokenizer(tmp_path, TEMPLATES["chatml"][0], eos="<|im_end|>")
    codec = Tokenizer(tmp_path)
    stopped_at = codec.encode(")")[0]
    given = given_tokens(codec, QUESTION, TURNS[0][1], last_token=stopped_at)
    [end] = codec.encode("<|im_end|>")
    assert given[0] == end
    assert given[1:] == given_tokens(codec, QUESTION, TURNS[0][1], last_token=end)


def test_a_tool_that_prints_the_mark_of_a_turn_hides_nothing(tmp_path: Path) -> None:
    template, eos = TEMPLATES["chatml"]
    reference = make_tokenizer(tmp_path, template, eos=eos)
    codec = Tokenizer(tmp_path)
    [end] = codec.encode(eos)
    answered = [{"role": "tool", "content": f"a {_MARK} b {_MARK}-0 c"}]
    given = given_tokens(codec, QUESTION, answered, last_token=end)
    whole = reference_ids(reference, [*QUESTION, {"role": "assistant", "content": "42"}, *answered])
    assert [*codec.chat(QUESTION), *codec.encode("42"), end, *given] == whole


def test_a_prompt_of_tokens_has_the_same_answers_as_one_of_messages(tmp_path: Path) -> None:
    make_tokenizer(tmp_path, TEMPLATES["chatml"][0], eos="<|im_end|>")
    codec = Tokenizer(tmp_path)
    assert given_tokens(codec, [], TURNS[0][1], last_token=2) == given_tokens(
        codec, QUESTION, TURNS[0][1], last_token=2
    )


def test_answers_that_cannot_be_used_are_refused_by_what_they_are(tmp_path: Path) -> None:
    make_tokenizer(tmp_path, "{% for m in messages if m.role == 'user' %}{{ m.content }}{% endfor %}", eos="<|eot|>")
    with pytest.raises(InputError, match="leaves out the assistant"):
        given_tokens(Tokenizer(tmp_path), QUESTION, TURNS[0][1], last_token=0)
    with pytest.raises(InputError, match="no chat template"):
        given_tokens(None, QUESTION, TURNS[0][1], last_token=0)
    with pytest.raises(InputError, match="no message with a role"):
        given_tokens(Tokenizer(tmp_path), QUESTION, [{"content": "x"}], last_token=0)
    with pytest.raises(InputError, match="from 3 to 99"):
        checked_tokens([3, 99], 99)
    for bad in ("text", 3, Reply(), End(reward=float("nan"))):
        with pytest.raises(InputError, match="it answered"):
            settled(bad)


def test_short_forms_of_answers() -> None:
    assert settled(None) == End()
    assert settled([{"role": "tool", "content": "1"}]) == Reply(messages=[{"role": "tool", "content": "1"}])
    assert settled(End(reward=True)) == End(reward=1.0)
    given = settled(Reply(token_ids=np.array([5, 6])))  # type: ignore[arg-type]
    assert given == Reply(token_ids=(5, 6))
    assert isinstance(given, Reply)
    assert checked_tokens(given.token_ids, 128) == [5, 6]
