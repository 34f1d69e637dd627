# SPDX-License-Identifier: Apache-2.0
"""The model against transformers and against its own specification, and what makes equal bits."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

torch = pytest.importorskip("torch")

from engines import a_chunk, an_engine, generate, tokens_of
from seer.engine.local import cpu_ops
from seer.engine.local.tiny import make_tiny_model
from seer.types import Chunk

PROMPTS = [list(range(3, 20 + 7 * i)) for i in range(5)]
SCALING = {
    "rope_type": "llama3",
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 64,
}
MODELS = {
    "llama": ("llama", {}),
    "llama tied": ("llama", {"tie_word_embeddings": True}),
    "llama 3.1 rope": ("llama", {"rope_scaling": SCALING}),
    "qwen2": ("qwen2", {}),
    "qwen3": ("qwen3", {"head_dim": 32}),
    "one kv head": ("llama", {"num_key_value_heads": 1}),
    "no sharing": ("llama", {"num_key_value_heads": 4}),
}


@pytest.fixture(scope="module", params=list(MODELS.values()), ids=list(MODELS))
def folder(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    family, changes = request.param
    return make_tiny_model(tmp_path_factory.mktemp("model"), family, **changes)


def chunks() -> list[Chunk]:
    return [a_chunk(i, prompt, max_tokens=30, temperature=float(i % 2)) for i, prompt in enumerate(PROMPTS)]


def test_log_probabilities_are_those_of_transformers(folder: Path) -> None:
    transformers = pytest.importorskip("transformers", reason="transformers is a development dependency")
    peer = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    for request, answer in generate(an_engine(folder), chunks()).items():
        ids = torch.tensor([PROMPTS[request] + answer.ids])
        with torch.inference_mode():
            expected = peer(ids).logits[0, len(PROMPTS[request]) - 1 : -1].log_softmax(-1)
        theirs = expected.gather(1, ids[0, len(PROMPTS[request]) :, None])[:, 0].tolist()
        assert answer.raw_logprobs == pytest.approx(theirs, abs=1e-4)
        if request % 2 == 0:
            assert answer.ids == expected.argmax(-1).tolist()


def test_native_kernels_compute_what_the_specification_says(folder: Path) -> None:
    if not cpu_ops.available():
        pytest.skip("the native kernels are not built")
    native, plain = generate(an_engine(folder), chunks()), generate(an_engine(folder, kernels="torch"), chunks())
    assert tokens_of(native) == tokens_of(plain)
    for request, answer in native.items():
        assert answer.raw_logprobs == pytest.approx(plain[request].raw_logprobs, abs=1e-4)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_half_precision_runs_and_stays_close(folder: Path, dtype: Any) -> None:
    exact = generate(an_engine(folder), chunks()[:2])
    rough = generate(an_engine(folder, dtype=dtype), chunks()[:2])
    for request in exact:
        assert rough[request].raw_logprobs[0] == pytest.approx(exact[request].raw_logprobs[0], abs=0.25)
