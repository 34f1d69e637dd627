# SPDX-License-Identifier: Apache-2.0
"""The model of programs that the docs show."""

from __future__ import annotations

from pathlib import Path

import pytest


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """In SmolLM2's place: random bytes with its chat template."""
    pytest.importorskip("torch")
    pytest.importorskip("transformers")
    from chat_models import SPECIAL, TEMPLATES, make_tokenizer
    from seer.engine.local.tiny import make_tiny_model

    end = SPECIAL.index("<|im_end|>")
    folder = make_tiny_model(
        tmp_path_factory.mktemp("docs") / "tiny", vocab_size=264, eos_token_id=end, max_position_embeddings=4096
    )
    template, eos = TEMPLATES["chatml"]
    make_tokenizer(folder, template, eos=eos)
    return folder
