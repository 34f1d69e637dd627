# SPDX-License-Identifier: Apache-2.0
"""The GPU kernels and the GPU runner under Triton's interpreter, on a CPU: the same tokens as the CPU engine.

Needs Triton and TRITON_INTERPRET=1: `make test` runs this file on its own, with both. tests/gpu runs the same on a GPU.
"""

from __future__ import annotations

import math
import os
from pathlib import Path
from typing import Any

import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("triton", reason="Triton is not installed")
if os.environ.get("TRITON_INTERPRET") != "1":
    pytest.skip("set TRITON_INTERPRET=1 to interpret the kernels", allow_module_level=True)

from engines import Generated, SessionDrafter, a_chunk, always, an_engine, generate, knowing, random_trees, tokens_of
from seer.drafting.grouped_drafter import GroupedDrafter
from seer.engine.local import gpu_ops, graph_shapes
from seer.engine.local.engine import Engine
from seer.engine.local.gpu_runner import GpuRunner
from seer.engine.local.tiny import make_tiny_model
from seer.errors import NoProbability
from seer.speculation.step_report import StepReport
from seer.types import Chunk

# As small as possible: the interpreter runs every program of every launch in Python.
SMALL = {"num_hidden_layers": 1, "vocab_size": 128}
SHAPES = [
    ("llama", SMALL | {"num_attention_heads": 2, "num_key_value_heads": 1}),
    ("qwen3", SMALL | {"num_attention_heads": 3, "num_key_value_heads": 1, "head_dim": 32}),
]


@pytest.fixture(autouse=True)
def few_programs(monkeypatch: pytest.MonkeyPatch) -> None:
    """Split contexts into 4 parts at most, and pad mixed steps less: a GPU's sizes would take minutes here."""
    monkeypatch.setattr(gpu_ops, "PROGRAMS", 4)
    monkeypatch.setattr(graph_shapes, "MIXED_SIZES", (8, 16, 24, 48))


@pytest.fixture(scope="module", params=SHAPES, ids=lambda shape: shape[0])
def folder(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    family, changes = request.param
    return make_tiny_model(tmp_path_factory.mktemp("model"), family, seed=1, **changes)


def chunks(max_tokens: int = 9) -> list[Chunk]:
    prompts = [list(range(5, 7 + 7 * i)) for i in range(3)]
    return [a_chunk(i, p, max_tokens=max_tokens - i, temperature=[1.0, 0.0, 0.7][i % 3]) for i, p in enumerate(prompts)]


@pytest.fixture(scope="module")
def expected(folder: Path) -> dict[int, Generated]:
    return generate(an_engine(folder), chunks())


def gpu_runner(engine: Engine) -> GpuRunner:
    assert isinstance(engine.runner, GpuRunner)
    return engine.runner


def assert_close(answers: dict[int, Generated], expected: dict[int, Generated]) -> None:
    assert tokens_of(answers) == tokens_of(expected)
    for request, answer in answers.items():
        assert answer.logprobs == pytest.approx(expected[request].logprobs, abs=2e-4)
        assert answer.raw_logprobs == pytest.approx(expected[request].raw_logprobs, abs=2e-4)


def test_bursts_of_decoding(folder: Path, expected: dict[int, Generated]) -> None:
    engine = an_engine(folder, kernels="triton", block_size=16, kv_blocks=64, max_num_seqs=4)
    assert_close(generate(engine, chunks()), expected)
    assert len(gpu_runner(engine).decoding), "no burst was made"


@pytest.fixture(params=["kernel by kernel", "by graph"])
def mixed(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> bool:
    """Whether steps with pieces of contexts are captured at once, or never."""
    by_graph: bool = request.param == "by graph"
    monkeypatch.setattr(graph_shapes, "EAGER_COST_TOKENS", graph_shapes.CAPTURE_COST_TOKENS if by_graph else 0)
    return by_graph


def test_pieces_of_contexts_among_decoding_rows(folder: Path, expected: dict[int, Generated], mixed: bool) -> None:
    engine = an_engine(folder, kernels="triton", block_size=8, kv_blocks=64, max_num_seqs=3, max_step_tokens=9)
    assert_close(generate(engine, chunks(), arrive={1: 3, 2: 5}), expected)
    assert bool(len(gpu_runner(engine).mixed)) is mixed


def test_pieces_of_contexts_among_trees(folder: Path, expected: dict[int, Generated], mixed: bool) -> None:
    drafter = knowing(tokens_of(expected), tree=True)
    engine = an_engine(
        folder, kernels="triton", block_size=8, kv_blocks=64, max_num_seqs=3, max_step_tokens=24,
        drafter=drafter, budget=always(4),
    )  # fmt: skip
    assert_close(generate(engine, chunks(), arrive={1: 2, 2: 3}), expected)
    assert any(shape.has_trees for shape in gpu_runner(engine).mixed) is mixed


def test_trees_that_are_often_right(folder: Path, expected: dict[int, Generated]) -> None:
    drafter = knowing(tokens_of(expected), tree=True)
    engine = an_engine(folder, kernels="triton", max_num_seqs=3, drafter=drafter, budget=always(4))
    answers = generate(engine, chunks())
    assert_close(answers, expected)
    assert sum(answer.num_accepted for answer in answers.values()) > 5


def test_random_trees(folder: Path, expected: dict[int, Generated]) -> None:
    engine = an_engine(folder, kernels="triton", max_num_seqs=3, drafter=random_trees(3, 128), budget=always(4))
    assert_close(generate(engine, chunks()), expected)


@pytest.mark.parametrize(("max_num_seqs", "is_right"), [(3, False), (2, True)])
def test_trees_several_steps_at_once(
    folder: Path, expected: dict[int, Generated], max_num_seqs: int, is_right: bool
) -> None:
    trees = knowing(tokens_of(expected), tree=True) if is_right else random_trees(3, 128)
    drafter = SessionDrafter(trees.propose)
    steps: list[StepReport] = []
    engine = an_engine(
        folder, kernels="triton", max_num_seqs=max_num_seqs, drafter=drafter,
        budget=always(4), on_step=steps.append,
    )  # fmt: skip
    assert_close(generate(engine, chunks()), expected)
    assert any(step.num_steps > 1 and step.num_drafted for step in steps)
    assert drafter.observed == tokens_of(expected)


def test_a_burst_of_drafts_ends_when_a_waiting_chunk_can_enter(folder: Path) -> None:
    steps: list[StepReport] = []
    engine = an_engine(
        folder, kernels="triton", max_num_seqs=2, drafter=SessionDrafter(random_trees(1, 128).propose),
        budget=always(2), on_step=steps.append,
    )  # fmt: skip
    for request, max_tokens in enumerate((4, 12, 12)):
        engine.add(a_chunk(request, [5, 6, 7 + request], max_tokens=max_tokens))
    with torch.inference_mode():
        while engine.scheduler.waiting:
            engine.step()
    # The first token comes with the prompt; then three steps, at most, until the short one leaves.
    assert sum(step.num_steps for step in steps) <= 2 + 3


def test_grouped_drafts_several_steps_at_once(folder: Path, expected: dict[int, Generated]) -> None:
    drafter = GroupedDrafter((), None)
    drafter.begin_run("test", "grouped", 0)
    for request, ids in tokens_of(expected).items():
        drafter.observe(0, 100 + request, ids, start=0)
    engine = an_engine(folder, kernels="triton", max_num_seqs=3, drafter=drafter, budget=always(4, 2))
    answers = generate(engine, chunks())
    assert_close(answers, expected)
    assert sum(answer.num_accepted for answer in answers.values()) > 10
    assert drafter.acceptance.survival()[1] > 0.5


def test_chunks_that_the_device_cannot_sample_for(folder: Path) -> None:
    some = [
        a_chunk(0, [5, 6, 7], max_tokens=8, top_p=0.7),
        a_chunk(1, [9, 8], max_tokens=8, min_tokens=6, stop_token_ids=(3, 4, 5), top_k=20),
        a_chunk(2, [9, 8, 1, 1], max_tokens=8),
    ]
    plain = generate(an_engine(folder), some)
    assert_close(generate(an_engine(folder, kernels="triton"), some), plain)


def test_stopping_inside_a_burst(folder: Path) -> None:
    free = generate(an_engine(folder), [a_chunk(0, [5, 6, 7], max_tokens=14)])[0].ids
    # The first token comes with the prompt, so the first burst makes the tokens 1 to 8.
    stop = next(token for at, token in enumerate(free) if at > 8 and token not in free[:at])
    some = [a_chunk(0, [5, 6, 7], max_tokens=14, stop_token_ids=(stop,)), a_chunk(1, [4, 4], max_tokens=12)]
    plain = generate(an_engine(folder), some)
    answers = generate(an_engine(folder, kernels="triton"), some)
    assert_close(answers, plain)
    assert answers[0].stop_token == stop


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
@pytest.mark.parametrize("how_many", ["one", "all"])
@pytest.mark.filterwarnings("ignore::RuntimeWarning")  # the interpreter computes with numpy
def test_logits_without_probabilities_end_a_burst(folder: Path, value: float, how_many: str) -> None:
    """A row with one NaN or infinity, or nothing else; a single minus infinity is a token that is never sampled."""
    engine = an_engine(folder, kernels="triton", block_size=16, kv_blocks=64, max_num_seqs=4)
    model: Any = engine.model
    logits = model.logits
    num_calls = 0

    def spoiled(*args: Any) -> Any:
        nonlocal num_calls
        num_calls += 1
        found = logits(*args)
        if num_calls > 3:  # after the prompts, within the first burst
            found[0, 77 if how_many == "one" else slice(None)] = value
        return found

    model.logits = spoiled
    if value == -math.inf and how_many == "one":
        generate(engine, chunks())
        return
    with pytest.raises(NoProbability, match=r"request \d, position"):
        generate(engine, chunks())
