# SPDX-License-Identifier: Apache-2.0
"""The batch scheduler: which chunks enter, what they share, and when they wait."""

from __future__ import annotations

from pathlib import Path

import pytest

torch = pytest.importorskip("torch")

from engines import FunctionDrafter, a_chunk, always, an_engine, generate, tokens_of
from seer.drafting.base import DraftTree
from seer.engine.local.tiny import make_tiny_model
from seer.errors import DraftError
from seer.speculation.step_report import StepReport
from seer.types import ChunkEnd


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_tiny_model(tmp_path_factory.mktemp("model"))


PROMPT = list(range(3, 43))


def test_siblings_that_arrive_together_compute_their_prompt_once(folder: Path) -> None:
    steps: list[StepReport] = []
    engine = an_engine(folder, block_size=4, on_step=steps.append)
    generate(engine, [a_chunk(i, PROMPT, max_tokens=4) for i in range(8)])
    rows = sum(step.num_batched_tokens for step in steps)
    # 40 for the first; the others compute the last block anew, for its last token samples their first.
    assert rows == 40 + 7 * 4 + 8 * 3


def test_a_chunk_waits_until_all_its_blocks_are_free(folder: Path) -> None:
    engine = an_engine(folder, kv_blocks=12, block_size=4)
    answers = generate(engine, [a_chunk(i, [i + 5] * 8, max_tokens=24) for i in range(3)])
    assert [answer.end for answer in answers.values()] == [ChunkEnd.LIMIT] * 3
    assert engine.num_steps >= 3 * 24


def test_no_more_run_at_once_than_there_are_sequence_slots(folder: Path) -> None:
    most = []
    engine = an_engine(folder, max_num_seqs=3, on_step=lambda step: most.append(step.num_running))
    generate(engine, [a_chunk(i, [5, 6, i + 7], max_tokens=6) for i in range(10)])
    assert max(most) == 3


def test_a_step_has_no_more_batched_tokens_than_allowed(folder: Path) -> None:
    rows = []
    drafter = FunctionDrafter(lambda ask: DraftTree.linear([1] * ask.max_tokens))
    engine = an_engine(
        folder,
        max_step_tokens=16,
        drafter=drafter,
        budget=always(30),
        on_step=lambda step: rows.append(step.num_batched_tokens),
    )
    generate(engine, [a_chunk(i, PROMPT[: 5 + i], max_tokens=12) for i in range(6)])
    assert max(rows) <= 16


def test_a_prefix_is_found_again_after_its_request_has_left(folder: Path) -> None:
    steps: list[StepReport] = []
    engine = an_engine(folder, block_size=4, on_step=steps.append)
    first = generate(engine, [a_chunk(0, PROMPT, max_tokens=9)])[0]
    steps.clear()
    generate(engine, [a_chunk(1, PROMPT + first.ids, max_tokens=1)])
    assert steps[0].num_batched_tokens == 1 + (40 + 9 - 1) % 4  # 48 of 49 tokens were computed and kept


def test_a_drafter_that_fails_costs_drafts_and_nothing_else(folder: Path) -> None:
    def fail(ask: object) -> DraftTree:
        raise DraftError("no server")

    chunk = [a_chunk(0, PROMPT, max_tokens=20)]
    engine = an_engine(folder, drafter=FunctionDrafter(fail))
    assert tokens_of(generate(engine, chunk)) == tokens_of(generate(an_engine(folder), chunk))
    assert engine.scheduler.num_draft_failures == 19


def test_stop_tokens_end_a_response_and_min_tokens_holds_them_back(folder: Path) -> None:
    free = generate(an_engine(folder), [a_chunk(0, PROMPT, max_tokens=40)])[0].ids
    stop = free[3]
    stopped = generate(an_engine(folder), [a_chunk(0, PROMPT, max_tokens=40, stop_token_ids=(stop,))])[0]
    assert stopped.ids == free[: free.index(stop) + 1]
    assert (stopped.end, stopped.stop_token) == (ChunkEnd.STOP, stop)
    held = generate(an_engine(folder), [a_chunk(0, PROMPT, max_tokens=40, stop_token_ids=(stop,), min_tokens=20)])[0]
    assert stop not in held.ids[:20]


def test_the_models_own_end_token_stops_unless_ignored(folder: Path) -> None:
    chunks = [a_chunk(i, [5, 6, i + 7], max_tokens=300, ignore_eos=False) for i in range(8)]
    ends = generate(an_engine(folder, kv_blocks=1024), chunks)
    stopped = [answer for answer in ends.values() if answer.end is ChunkEnd.STOP]
    assert stopped
    assert all(answer.ids[-1] == 2 and 2 not in answer.ids[:-1] for answer in stopped)
