# SPDX-License-Identifier: Apache-2.0
"""The embedded engine on a GPU: in fp32 the tokens of the CPU engine, by graph, in bursts, with trees."""

from __future__ import annotations

from pathlib import Path

import pytest

torch = pytest.importorskip("torch")
if not torch.cuda.is_available():
    pytest.skip("there is no CUDA device", allow_module_level=True)

from engines import Generated, SessionDrafter, a_chunk, always, an_engine, generate, knowing, random_trees, tokens_of
from seer.engine.local import graph_shapes
from seer.engine.local.gpu_runner import GpuRunner
from seer.engine.local.tiny import make_tiny_model
from seer.speculation.step_report import StepReport
from seer.types import Chunk

pytestmark = pytest.mark.gpu
CUDA = {"device": torch.device("cuda"), "block_size": 16, "kv_blocks": 256}


@pytest.fixture(scope="module", params=["llama", "qwen2", "qwen3"])
def folder(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_tiny_model(tmp_path_factory.mktemp("model"), request.param, seed=1)


@pytest.fixture(autouse=True)
def exact_products() -> None:
    torch.backends.cuda.matmul.allow_tf32 = False


def chunks(max_tokens: int = 90) -> list[Chunk]:
    prompts = [list(range(3, 9 + 5 * i)) for i in range(16)]
    return [a_chunk(i, p, max_tokens=max_tokens - i, temperature=[1.0, 0.0][i % 2]) for i, p in enumerate(prompts)]


@pytest.fixture(scope="module")
def expected(folder: Path) -> dict[int, Generated]:
    return generate(an_engine(folder, kernels="torch"), chunks())


def assert_close(answers: dict[int, Generated], expected: dict[int, Generated]) -> None:
    same = sum(answer.ids == expected[request].ids for request, answer in answers.items())
    assert same >= len(expected) - 1, f"{len(expected) - same} requests differ: more than a near-tie explains"
    for request, answer in answers.items():
        if answer.ids == expected[request].ids:
            assert answer.raw_logprobs == pytest.approx(expected[request].raw_logprobs, abs=5e-3)


def test_bursts(folder: Path, expected: dict[int, Generated]) -> None:
    assert_close(generate(an_engine(folder, **CUDA, max_num_seqs=16), chunks()), expected)


@pytest.mark.parametrize("how", ["kernel by kernel", "by graph", "as it comes"])
@pytest.mark.parametrize("drafts", [0, 6])
def test_pieces_of_contexts(
    folder: Path, expected: dict[int, Generated], how: str, drafts: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    eager = {
        "kernel by kernel": 0,
        "by graph": graph_shapes.CAPTURE_COST_TOKENS,
        "as it comes": graph_shapes.EAGER_COST_TOKENS,
    }
    monkeypatch.setattr(graph_shapes, "EAGER_COST_TOKENS", eager[how])
    drafter = knowing(tokens_of(expected), tree=True) if drafts else None
    engine = an_engine(folder, **CUDA, max_num_seqs=5, max_step_tokens=40, drafter=drafter, budget=always(drafts))
    assert_close(generate(engine, chunks(), arrive={i: 3 * i for i in range(16)}), expected)
    assert isinstance(engine.runner, GpuRunner)
    assert bool(len(engine.runner.mixed)) is (how != "kernel by kernel")


@pytest.mark.parametrize("max_draft", [2, 6, 20])
def test_trees(folder: Path, expected: dict[int, Generated], max_draft: int) -> None:
    for drafter in (knowing(tokens_of(expected), tree=True), random_trees(3, 128)):
        engine = an_engine(folder, **CUDA, max_num_seqs=7, drafter=drafter, budget=always(max_draft))
        assert_close(generate(engine, chunks()), expected)


@pytest.mark.parametrize("max_draft", [2, 6, 20])
@pytest.mark.parametrize("max_num_seqs", [7, 16])
def test_trees_several_steps_at_once(
    folder: Path, expected: dict[int, Generated], max_num_seqs: int, max_draft: int
) -> None:
    for drafter in (knowing(tokens_of(expected), tree=True), random_trees(3, 128)):
        steps: list[StepReport] = []
        follows = SessionDrafter(drafter.propose)
        engine = an_engine(
            folder, **CUDA, max_num_seqs=max_num_seqs, drafter=follows, budget=always(max_draft), on_step=steps.append
        )
        assert_close(generate(engine, chunks()), expected)
        assert any(step.num_steps > 1 and step.num_drafted for step in steps)


def test_top_p_and_top_k_are_sampled_on_the_host(folder: Path) -> None:
    some = [a_chunk(i, [5, 6, 7 + i], max_tokens=20, top_p=0.8, top_k=30, min_tokens=5) for i in range(4)]
    assert_close(generate(an_engine(folder, **CUDA), some), generate(an_engine(folder, kernels="torch"), some))
