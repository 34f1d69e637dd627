"""Responses as a run completes them and as its file keeps them."""

import json
from collections.abc import Mapping, Sequence
from pathlib import Path

import pytest

from seer.errors import InputError
from seer.runs.results import complete, read_responses, write_responses
from seer.types import FinishReason, Response


class Ascii:
    """A tokenizer whose tokens are characters."""

    def encode(self, text: str) -> list[int]:
        return list(text.encode())

    def chat(self, messages: Sequence[Mapping[str, str]]) -> list[int]:
        return [token for message in messages for token in self.encode(message["content"])]

    def decode(self, tokens: Sequence[int]) -> str:
        return bytes(tokens).decode()


def a_response() -> Response:
    return Response(
        group=0,
        prompt_id="p",
        index=1,
        token_ids=[104, 105],
        logprobs=[-0.5, -0.25],
        finish_reason=FinishReason.STOP,
        weights_version=3,
        seed=9,
        num_prompt_tokens=1,
        num_tokens=2,
        queued_s=100.0,
        started_s=None,
        finished_s=101.5,
        num_chunks=1,
        num_migrations=0,
    )


def test_a_run_adds_the_text_and_counts_times_from_its_beginning() -> None:
    response = a_response()
    complete(response, Ascii(), began_s=99.0)
    assert response.text == "hi"
    assert (response.queued_s, response.started_s, response.finished_s) == (1.0, None, 2.5)


def test_a_line_of_a_results_file_is_a_response_and_comes_back_equal(tmp_path: Path) -> None:
    path = tmp_path / "results.jsonl"
    write_responses(path, [a_response(), a_response()])
    first, second = read_responses(path)
    assert first == second == a_response()
    assert list(json.loads(path.read_text().splitlines()[0])) == [
        "group",
        "prompt_id",
        "index",
        "text",
        "token_ids",
        "logprobs",
        "raw_logprobs",
        "finish_reason",
        "weights_version",
        "seed",
        "num_prompt_tokens",
        "num_tokens",
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
    write_responses(path, [a_response()])
    with path.open("a") as file:
        file.write("{}\n")
    with pytest.raises(InputError, match="line 2"):
        list(read_responses(path))
