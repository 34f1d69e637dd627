# SPDX-License-Identifier: Apache-2.0
"""Responses as a run completes them and as its file keeps them."""

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest

from builders import a_response
from seer.errors import InputError, SeerError
from seer.runs.results import ResultsFile, complete, read_responses


class Ascii:
    """A tokenizer whose tokens are characters."""

    def encode(self, text: str) -> list[int]:
        return list(text.encode())

    def chat(self, messages: Sequence[Mapping[str, Any]], **_: Any) -> list[int]:
        return [token for message in messages for token in self.encode(message["content"])]

    def decode(self, tokens: Sequence[int]) -> str:
        return bytes(tokens).decode()


def test_a_run_adds_the_text_and_counts_times_from_its_beginning() -> None:
    response = a_response([104, 105], queued_s=100.0, started_s=None, finished_s=101.5)
    complete(response, Ascii(), began_s=99.0)
    assert response.text == "hi"
    assert (response.queued_s, response.started_s, response.finished_s) == (1.0, None, 2.5)


def test_a_line_of_a_results_file_is_a_response_and_comes_back_equal(tmp_path: Path) -> None:
    written = a_response(index=1, logprobs=[-0.5, -0.25], weights_version=3, seed=9, started_s=None)
    path = tmp_path / "results.jsonl"
    with ResultsFile(path, replace=False) as results:
        results.write([written, written])
    first, second = read_responses(path)
    assert first == second == written
    assert list(json.loads(path.read_text().splitlines()[0])) == [
        "group",
        "prompt_id",
        "index",
        "text",
        "token_ids",
        "logprobs",
        "raw_logprobs",
        "loss_mask",
        "turns",
        "finish_reason",
        "weights_version",
        "seed",
        "num_prompt_tokens",
        "num_tokens",
        "num_given_tokens",
        "queued_s",
        "started_s",
        "finished_s",
        "num_chunks",
        "num_migrations",
        "error",
        "reward",
        "reward_error",
    ]


def test_a_file_that_is_not_of_results_is_refused_with_its_line(tmp_path: Path) -> None:
    path = tmp_path / "results.jsonl"
    with ResultsFile(path, replace=False) as results:
        results.write([a_response()])
    with path.open("a") as file:
        file.write("{}\n")
    with pytest.raises(InputError, match="line 2"):
        list(read_responses(path))


def fail_after_one_response(path: Path) -> None:
    with ResultsFile(path, replace=True) as results:
        results.write([a_response()])
        raise KeyError


def test_an_older_file_stays_until_the_run_has_ended_and_after_an_error(tmp_path: Path) -> None:
    path = tmp_path / "results.jsonl"
    path.write_text("older")
    with pytest.raises(KeyError):
        fail_after_one_response(path)
    assert path.read_text() == "older"
    with ResultsFile(path, replace=True):
        pass  # a run that was stopped before its first response
    assert path.read_text() == "older"
    with ResultsFile(path, replace=True) as results:
        results.write([a_response()])
        assert path.read_text() == "older"
    assert list(read_responses(path)) == [a_response()]
    assert list(tmp_path.iterdir()) == [path]


def test_after_an_error_what_was_finished_is_kept_where_no_file_was(tmp_path: Path) -> None:
    path = tmp_path / "new" / "results.jsonl"
    with pytest.raises(KeyError):
        fail_after_one_response(path)
    assert list(read_responses(path)) == [a_response()]
    assert list(path.parent.iterdir()) == [path]


def test_a_file_made_during_the_run_is_not_replaced(tmp_path: Path) -> None:
    path = tmp_path / "results.jsonl"
    results = ResultsFile(path, replace=False)
    results.write([a_response()])
    path.write_text("another's")
    with pytest.raises(SeerError, match="during the run") as refused:
        results.__exit__(None, None, None)
    assert path.read_text() == "another's"
    assert list(read_responses(results.partial)) == [a_response()]
    assert str(results.partial) in str(refused.value.hint)


def test_two_runs_do_not_write_to_one_place(tmp_path: Path) -> None:
    path = tmp_path / "results.jsonl"
    path.with_name("results.jsonl.partial").write_text("of a killed run")
    with ResultsFile(path, replace=False) as results:
        results.write([a_response()])
        with pytest.raises(InputError, match="in use"):
            ResultsFile(path, replace=True)
    assert list(read_responses(path)) == [a_response()]
