# SPDX-License-Identifier: Apache-2.0
import itertools
import json
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from seer.errors import ConfigError, InputError
from seer.runs import prompts as prompts_module
from seer.runs.prompts import EncodedPrompt, Prompt, as_prompts, encode, read_prompts
from seer.types import Sampling


class Letters:
    """A token per letter."""

    def encode(self, text: str) -> list[int]:
        return [ord(letter) for letter in text]

    def chat(self, messages: Sequence[Mapping[str, Any]], **_: Any) -> list[int]:
        return self.encode("".join(f"<{m['role']}>{m['content']}" for m in messages))

    def decode(self, tokens: Sequence[int]) -> str:
        return "".join(map(chr, tokens))


def a_file(path: Path, *lines: object) -> Path:
    file = path / "prompts.jsonl"
    file.write_text("\n".join(line if isinstance(line, str) else json.dumps(line) for line in lines) + "\n")
    return file


def test_the_three_kinds_are_read(tmp_path: Path) -> None:
    file = a_file(
        tmp_path,
        {"prompt": "hello"},
        {"messages": [{"role": "user", "content": "hi"}], "id": "chat", "n": 3, "temperature": 0.5},
        "",
        {"prompt_token_ids": [1, 2], "seed": 9},
    )
    good, bad = read_prompts(file)
    assert bad == []
    assert [(p.id, p.line) for p in good] == [("1", 1), ("chat", 2), ("4", 4)]
    assert good[0].text == "hello"
    assert (good[1].n, good[1].sampling) == (3, {"temperature": 0.5})
    assert (good[2].token_ids, good[2].seed) == ((1, 2), 9)


@pytest.mark.parametrize(
    ("line", "why"),
    [
        ("{not json", "not JSON"),
        ("[1]", "a list, not an object"),
        ({}, "exactly one of"),
        ({"prompt": "a", "prompt_token_ids": [1]}, "got prompt and prompt_token_ids"),
        ({"prompt": ""}, "empty"),
        ({"prompt": 3}, "not text"),
        ({"prompt": "a", "promt": 1}, "unknown key 'promt'"),
        ({"prompt": []}, "prompt is a list, not text"),
        ({"prompt": [1, 2]}, "prompt is a list, not text"),
        ({"prompt": [{"role": "robot", "content": "x"}]}, "unknown role 'robot'"),
        ({"messages": []}, "at least one message"),
        ({"messages": [{"role": "robot", "content": "x"}]}, "unknown role 'robot'"),
        ({"messages": [{"role": "user"}]}, "no text content"),
        ({"messages": [{"role": "user", "content": ""}]}, "every message is empty"),
        (
            {"messages": [{"role": "user", "content": [{"type": "image_url", "image_url": {}}]}]},
            "message 0: prompts with",
        ),
        ({"messages": [{"role": "user", "content": [{"type": "text", "text": "a"}]}]}, "no text content"),
        ({"prompt": "a", "images": ["a.png"]}, "prompts with images, video or sound are not supported"),
        ({"messages": ["hi"]}, "not an object"),
        ({"prompt_token_ids": []}, "at least one token id"),
        ({"prompt_token_ids": [1, -2]}, "whole numbers"),
        ({"prompt_token_ids": [True]}, "whole numbers"),
        ({"prompt": "a", "n": 0}, "n=0"),
        ({"prompt": "a", "temperature": -1}, "temperature=-1"),
        ({"prompt": "a", "temperature": "hot"}, "temperature='hot': expected `float`"),
        ({"prompt": "a", "id": []}, "id=[]: expected `int | str | null`"),
        ({"prompt": "a", "seed": 2**63}, "seed=9223372036854775808 is out of range; use 0 to"),
        ({"prompt": "a", "n": 50_000_000}, "n=50000000 is out of range; use 1 to 65,536"),
        ({"prompt_token_ids": [2**31]}, "whole numbers from 0 to 2,147,483,647"),
        ('{"prompt": "a", "temperature": NaN}', "not JSON"),
        ('{"prompt": "a", "temperature": 1e400}', "not JSON"),
        ('{"prompt": "\\ud83d half"}', "not JSON"),
        ("[" * 100_000, "not JSON"),
    ],
)
def test_a_bad_line_is_reported_by_number_and_the_others_are_kept(tmp_path: Path, line: object, why: str) -> None:
    good, bad = read_prompts(a_file(tmp_path, {"prompt": "first"}, line, {"prompt": "last"}))
    assert [p.text for p in good] == ["first", "last"]
    assert [b.where for b in bad] == ["line 2"]
    assert why in bad[0].why


def test_messages_may_stand_under_prompt_as_in_data_sets_of_trl(tmp_path: Path) -> None:
    messages = [{"role": "user", "content": "hi"}]
    good, bad = read_prompts(a_file(tmp_path, {"prompt": messages}))
    assert bad == []
    assert (good[0].text, good[0].messages) == (None, tuple(messages))


def test_in_python_a_prompt_may_be_what_a_line_of_a_file_has(tmp_path: Path) -> None:
    lines: list[dict[str, Any]] = [
        {"prompt": "hello"},
        {"messages": [{"role": "user", "content": "hi"}], "id": "chat", "n": 3, "temperature": 0.5},
        {"prompt_token_ids": [1, 2], "seed": 9, "priority": 1},
    ]
    from_file, _ = read_prompts(a_file(tmp_path, *lines))
    given = [prompt for prompt in as_prompts(lines, first=1) if isinstance(prompt, Prompt)]
    assert given == [replace(prompt, line=None) for prompt in from_file]


@pytest.mark.parametrize(
    ("item", "why"),
    [
        ({}, "needs exactly one of prompt, messages, prompt_token_ids, got none"),
        ({"prompt": "a", "answer": "b"}, "unknown key 'answer'"),
        ({"prompt": "a", "multi_modal_data": {}}, "prompts with images"),
        ({"prompt_token_ids": []}, "at least one token id"),
        ({"prompt": "a", "n": 0}, "n=0"),
        ({3: "a"}, "unknown key 3"),
    ],
)
def test_a_bad_object_in_python_is_refused_with_its_position(item: Any, why: str) -> None:
    with pytest.raises(InputError, match=why) as refused:
        as_prompts(["first", item])
    assert "prompt 1" in str(refused.value)


def test_an_id_is_used_once(tmp_path: Path) -> None:
    _, bad = read_prompts(a_file(tmp_path, {"prompt": "a", "id": "x"}, {"prompt": "b", "id": "x"}))
    assert "line 1" in bad[0].why


def test_an_unreadable_or_empty_file_is_refused(tmp_path: Path) -> None:
    with pytest.raises(InputError, match="cannot be read"):
        read_prompts(tmp_path / "absent")
    with pytest.raises(InputError, match="no prompt"):
        read_prompts(a_file(tmp_path, ""))
    with pytest.raises(InputError, match="cannot be read"):
        read_prompts(tmp_path)


def test_a_line_that_is_not_utf_8_is_one_bad_line(tmp_path: Path) -> None:
    file = tmp_path / "binary"
    file.write_bytes(b'{"prompt": "a"}\n{"prompt": "\xff\xfe"}\n')
    good, bad = read_prompts(file)
    assert [p.text for p in good] == ["a"]
    assert [b.where for b in bad] == ["line 2"]


def test_only_a_line_feed_ends_a_line(tmp_path: Path) -> None:
    text = "a\u2028b\u2029c\x85d"
    good, bad = read_prompts(a_file(tmp_path, json.dumps({"prompt": text}, ensure_ascii=False)))
    assert ([p.text for p in good], bad) == ([text], [])


def test_prompts_of_python_are_told_apart_and_all_problems_come_at_once() -> None:
    prompts = as_prompts(["text", [{"role": "user", "content": "q"}], [1, 2], Prompt(text="x", id="mine")])
    assert [p.id for p in prompts if isinstance(p, Prompt)] == ["0", "1", "2", "mine"]
    with pytest.raises(InputError, match=r"2 bad prompts: prompt 0: .*; prompt 2: "):
        as_prompts(["", "fine", []])


def test_an_iterator_without_end_is_refused_at_what_a_run_can_have(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(prompts_module, "most_responses", lambda: 100)
    assert len(as_prompts(["fine"] * 100)) == 100
    given = itertools.count()
    with pytest.raises(InputError, match="more than 100 prompts") as caught:
        as_prompts(f"prompt {number}" for number in given)
    assert next(given) == 101
    assert "enough_groups" in str(caught.value.hint)


def test_half_a_character_is_refused_before_anything_is_generated() -> None:
    with pytest.raises(InputError, match="half a character"):
        as_prompts(["fine", "not \ud800"])
    with pytest.raises(InputError, match="half a character"):
        as_prompts([[{"role": "user", "content": "\udfff"}]])


def test_a_token_outside_the_vocabulary_is_refused() -> None:
    prompts = [
        *as_prompts([[1, 9], [1, 10]]),
        Prompt(token_ids=(1,), id="stop", sampling={"stop_token_ids": (3, 10)}),
    ]
    good, bad = encode(prompts, None, n=1, sampling=Sampling(max_tokens=1), max_model_len=9, vocab_size=10)
    assert [g.token_ids for g in good] == [(1, 9)]
    assert [b.why for b in bad] == ["token id 10 is outside the model's vocabulary of 10 tokens"] * 2


def test_numbers_of_python_are_within_their_ranges() -> None:
    with pytest.raises(ConfigError, match="n=0 is out of range"):
        Prompt(text="a", id="0", n=0)
    with pytest.raises(ConfigError, match="n=50000000 is out of range"):
        encode(as_prompts(["a"]), Letters(), n=50_000_000, sampling=Sampling(max_tokens=1), max_model_len=9)


def test_encoding_finds_what_is_too_long_and_settles_sampling() -> None:
    prompts = as_prompts(["abc", "abcdefgh", [{"role": "user", "content": "q"}]])
    good, bad = encode(prompts, Letters(), n=4, sampling=Sampling(max_tokens=5), max_model_len=12)
    assert [(g.token_ids[0], g.n) for g in good] == [(ord("a"), 4), (ord("<"), 4)]
    assert [str(b) for b in bad] == [
        "prompt 1: 8 prompt tokens and max_tokens=5 exceed the 12 tokens that fit",
    ]
    own = Prompt(text="a", id="0", n=2, sampling={"max_tokens": 9})
    ((encoded,), _) = encode([own], Letters(), n=4, sampling=Sampling(max_tokens=5), max_model_len=12)
    assert (encoded.n, encoded.sampling.max_tokens) == (2, 9)


def test_without_a_tokenizer_only_token_ids_will_do() -> None:
    good, bad = encode(as_prompts(["a", [7]]), None, n=1, sampling=Sampling(max_tokens=1), max_model_len=9)
    assert [g.token_ids for g in good] == [(7,)]
    assert "no tokenizer" in bad[0].why


def test_encoded_prompts_among_others_keep_their_place_and_are_checked_too() -> None:
    given = EncodedPrompt(Prompt(token_ids=(5, 6), id="mine"), (5, 6), Sampling(max_tokens=2), 3)
    prompts = as_prompts(["ab", given, [7]])
    settings = {"n": 1, "sampling": Sampling(max_tokens=4), "max_model_len": 12}
    good, bad = encode(prompts, Letters(), **settings, vocab_size=200)  # type: ignore[arg-type]
    assert [one.prompt.id for one in good] == ["0", "mine", "2"]
    assert (good[1], bad) == (given, [])
    assert [one.n for one in good] == [1, 3, 1]
    unfit = [
        replace(given, token_ids=(5, 200)),
        replace(given, token_ids=(-1,)),
        replace(given, token_ids=(1.5,)),  # type: ignore[arg-type]
        replace(given, token_ids=()),
        replace(given, sampling=Sampling(max_tokens=2, stop_token_ids=(200,))),
        replace(given, sampling=Sampling(max_tokens=11)),
        replace(given, n=0),
        replace(given, prompt=Prompt(token_ids=(5, 6), id="a\ud800")),
    ]
    good, bad = encode(as_prompts(["a", *unfit]), Letters(), **settings, vocab_size=200)  # type: ignore[arg-type]
    assert len(good) == 1
    assert [one.where for one in bad] == [f"prompt {1 + i}" for i in range(len(unfit))]


@pytest.mark.parametrize("text", ["a\ud800", "\udfff b"])
def test_half_a_character_in_a_text_a_message_or_an_id_is_refused_when_it_is_encoded(text: str) -> None:
    prompts = [
        Prompt(text=text, id="0"),
        Prompt(messages=({"role": "user", "content": text},), id="1"),
        Prompt(token_ids=(1,), id=text),
    ]
    good, bad = encode(prompts, Letters(), n=1, sampling=Sampling(max_tokens=4), max_model_len=12)
    assert not good
    assert all("half a character" in one.why for one in bad)
