# SPDX-License-Identifier: Apache-2.0
"""Long texts are encoded and decoded by other calls of the library than short ones, to the same tokens and text."""

from __future__ import annotations

from pathlib import Path

import pytest

pytest.importorskip("transformers")

from chat_models import CHATML, SPECIAL, make_tokenizer
from seer.engine.local.tokenizer import LONG_TOKENS, Tokenizer


def test_a_long_text_has_the_tokens_of_transformers_and_comes_back(tmp_path: Path) -> None:
    reference = make_tokenizer(tmp_path, CHATML, eos="<|im_end|>")
    tokenizer = Tokenizer(tmp_path)
    text = "<|im_start|>grüße \N{GRINNING FACE} " * LONG_TOKENS
    ids = tokenizer.encode(text)
    assert ids == reference.encode(text, add_special_tokens=False)
    assert len(ids) > LONG_TOKENS
    assert tokenizer.decode(ids, skip_special=False) == text
    assert tokenizer.decode(ids) == text.replace("<|im_start|>", "")


def test_no_token_stands_for_more_characters_than_the_bound(tmp_path: Path) -> None:
    make_tokenizer(tmp_path, CHATML, eos="<|im_end|>")
    tokenizer = Tokenizer(tmp_path)
    assert tokenizer.max_token_chars == max(map(len, SPECIAL))
    text = "".join(SPECIAL)
    assert len(text) <= tokenizer.max_token_chars * len(tokenizer.encode(text))
