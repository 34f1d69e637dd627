# SPDX-License-Identifier: Apache-2.0
"""Responses with turns are verified: during a run, and in its folder, where whatever was done to them is found."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("torch")

from recorded_runs import NUM_PROMPTS, VOCABULARY, N, RecordedRun, make_run
from scripted_environment import SAMPLING, STOPS, Scripted
from seer import HostingConfig, Rollout
from seer.cli.main import main
from seer.engine.local.tiny import make_tiny_model
from seer.runs.results import read_responses
from seer.verification.verify import PlainModel, ResponseToVerify, verify

ENVIRONMENT = "scripted_environment:Scripted"
OPTIONS = ("--environment", ENVIRONMENT, "--max-tokens", "120", "--set", f"sampling.stop_token_ids={list(STOPS)}")


@pytest.fixture(scope="module")
def talked(tmp_path_factory: pytest.TempPathFactory) -> RecordedRun:
    """A finished run whose responses have turns."""
    return make_run(tmp_path_factory.mktemp("talked"), *OPTIONS)


@pytest.fixture
def talked_copy(talked: RecordedRun, tmp_path: Path) -> RecordedRun:
    return talked.copied_to(tmp_path / "copy")


def verified(run: RecordedRun, capsys: pytest.CaptureFixture[str]) -> tuple[int, dict[str, Any]]:
    capsys.readouterr()
    code = main(["verify", str(run.path), "--share", "1", "--json"])
    printed = capsys.readouterr()
    assert printed.out, printed.err
    found: dict[str, Any] = json.loads(printed.out)
    return code, found


def kinds(found: dict[str, Any]) -> set[str]:
    return {one["kind"] for one in found["findings"]}


def test_a_run_with_turns_is_clean_and_every_generated_token_is_scored(
    talked: RecordedRun, capsys: pytest.CaptureFixture[str]
) -> None:
    responses = talked.responses()
    assert sum(len(one["turns"]) > 2 for one in responses) >= NUM_PROMPTS, "the conversations have several turns"
    code, found = verified(talked, capsys)
    assert (code, found["findings"]) == (0, [])
    assert found["num_checked"] == found["num_responses"] == NUM_PROMPTS * N
    assert found["num_tokens"] == sum(sum(one["loss_mask"]) for one in responses)


def test_responses_with_turns_are_verified_during_the_run(tmp_path: Path) -> None:
    model = make_tiny_model(tmp_path / "tiny")

    async def scenario() -> None:
        async with Rollout(model, kv_blocks=256, hosting=HostingConfig(pin_cores=False)) as rollout:
            prompts = [[3 + i, 7, 11] for i in range(3)]
            run = rollout.run(prompts, n=4, sampling=SAMPLING, environment=Scripted(), verify=1.0)
            responses = [response async for group in run for response in group.responses]
            found = rollout.verification
            assert found is not None
            assert found.is_clean
            assert (found.num_responses, found.num_tokens) == (12, sum(one.num_tokens for one in responses))

    asyncio.run(scenario())


def longest(run: RecordedRun) -> tuple[int, dict[str, Any]]:
    """The response with the most turns: it has a given turn in the middle."""
    responses = run.responses()
    position = max(range(len(responses)), key=lambda at: len(responses[at]["turns"]))
    return position, responses[position]


def given_turn(response: dict[str, Any]) -> dict[str, Any]:
    return next(turn for turn in response["turns"] if turn["kind"] == "given" and turn["end"] > turn["start"])


def altered_given_token(run: RecordedRun) -> None:
    position, one = longest(run)
    at = given_turn(one)["start"]
    ids = [*one["token_ids"]]
    ids[at] = (ids[at] + 1) % VOCABULARY
    run.change_response(position, token_ids=ids, text=" ".join(f"w{token}" for token in ids))


def altered_mask(value: int) -> Callable[[RecordedRun], None]:
    def alter(run: RecordedRun) -> None:
        position, one = longest(run)
        mask = [*one["loss_mask"]]
        mask[mask.index(1 - value)] = value
        run.change_response(position, loss_mask=mask)

    return alter


def moved_boundary(by: int, *, with_counts: bool) -> Callable[[RecordedRun], None]:
    """The first generated turn ends `by` tokens later, in turns and mask, and if asked for in counts too."""

    def move(run: RecordedRun) -> None:
        position, one = longest(run)
        turns = [dict(turn) for turn in one["turns"]]
        turns[0]["end"] = turns[1]["start"] = turns[0]["end"] + by
        mask = [int(turn["kind"] == "generated") for turn in turns for _ in range(turn["start"], turn["end"])]
        counts = {"num_tokens": sum(mask), "num_given_tokens": len(mask) - sum(mask)} if with_counts else {}
        run.change_response(position, turns=turns, loss_mask=mask, **counts)

    return move


def cut_turn(run: RecordedRun) -> None:
    """Without the last generated turn and what was given before it, in every field: it ends a turn earlier."""
    position, one = longest(run)
    turns = [*one["turns"][:-3], one["turns"][-1]]
    end = turns[-2]["end"]
    turns[-1] = turns[-1] | {"start": end, "end": end}
    kept = {name: one[name][:end] for name in ("token_ids", "logprobs", "raw_logprobs", "loss_mask")}
    counts = {"num_tokens": sum(kept["loss_mask"]), "num_given_tokens": end - sum(kept["loss_mask"])}
    text = " ".join(f"w{token}" for token in kept["token_ids"])
    run.change_response(position, turns=turns, text=text, finish_reason="stop", **kept, **counts)


def without_turns(run: RecordedRun) -> None:
    position, one = longest(run)
    run.change_response(position, turns=[], loss_mask=None, num_tokens=len(one["token_ids"]), num_given_tokens=0)


def doubled_turn(run: RecordedRun) -> None:
    position, one = longest(run)
    run.change_response(position, turns=[one["turns"][0], *one["turns"]])


def other_reward(run: RecordedRun) -> None:
    run.change_response(longest(run)[0], reward=100.0)


FOUND: dict[str, tuple[Callable[[RecordedRun], None], set[str]]] = {
    "an altered given token": (altered_given_token, {"journal"}),
    "a generated token masked": (altered_mask(0), {"mask"}),
    "a given token in the loss": (altered_mask(1), {"mask"}),
    "a turn that ends later": (moved_boundary(1, with_counts=True), {"end"}),
    "a turn that ends earlier": (moved_boundary(-1, with_counts=True), {"mask"}),
    "a turn that ends later, without its counts": (moved_boundary(1, with_counts=False), {"end"}),
    "a cut turn": (cut_turn, {"journal"}),
    "no turns": (without_turns, {"turns"}),
    "a turn twice": (doubled_turn, {"turns"}),
    "another reward": (other_reward, {"journal"}),
    "a raw log-probability less": (
        lambda run: run.change_response(longest(run)[0], raw_logprobs=longest(run)[1]["raw_logprobs"][1:]),
        {"counts", "mask"},
    ),
    "given last": (
        lambda run: run.change_response(longest(run)[0], turns=longest(run)[1]["turns"][:-2]),
        {"turns"},
    ),
}


@pytest.mark.parametrize("name", FOUND)
def test_whatever_was_done_to_turns_is_found(
    talked_copy: RecordedRun, capsys: pytest.CaptureFixture[str], name: str
) -> None:
    damage, expected = FOUND[name]
    damage(talked_copy)
    code, found = verified(talked_copy, capsys)
    assert code == 1
    assert kinds(found) == expected


@pytest.mark.parametrize("name", ["an altered given token", "a generated token masked", "a given token in the loss"])
def test_scoring_alone_finds_what_changes_the_conversation(talked_copy: RecordedRun, name: str) -> None:
    def score() -> bool:
        position, _ = longest(talked_copy)
        response = list(read_responses(talked_copy.file("results.jsonl")))[position]
        prompt = (3 + response.group, 7, 11)
        return verify(PlainModel(talked_copy.model), [ResponseToVerify(prompt, SAMPLING, response)]).is_clean

    assert score()
    FOUND[name][0](talked_copy)
    assert not score()


def test_an_environment_in_a_run_without_one_is_found(
    run_copy: RecordedRun, capsys: pytest.CaptureFixture[str]
) -> None:
    length = len(run_copy.responses()[0]["token_ids"])
    run_copy.change_response(0, loss_mask=[1] * length)
    code, found = verified(run_copy, capsys)
    assert (code, kinds(found)) == (1, {"turns"})


def test_a_run_is_resumed_with_the_environment_it_had_and_only_if_that_is_named(
    talked_copy: RecordedRun, capsys: pytest.CaptureFixture[str]
) -> None:
    before = talked_copy.responses()
    assert main(["rollout", "--resume", str(talked_copy.path), "--quiet"]) == 2
    assert f"--environment {ENVIRONMENT}" in capsys.readouterr().err
    journal = talked_copy.lines("journal.jsonl")
    talked_copy.write_lines("journal.jsonl", journal[: len(journal) // 2])
    talked_copy.file("results.jsonl").unlink()
    assert main(["rollout", "--resume", str(talked_copy.path), "--environment", ENVIRONMENT, "--quiet"]) == 0
    tokens = {(one["group"], one["index"]): (one["token_ids"], one["loss_mask"]) for one in before}
    assert {
        (one["group"], one["index"]): (one["token_ids"], one["loss_mask"]) for one in talked_copy.responses()
    } == tokens
    assert verified(talked_copy, capsys)[0] == 0


@pytest.mark.parametrize(
    "name", ["scripted_environment", "no_such_module:a", "scripted_environment:nothing", "json:dumps", "enum:Enum"]
)
def test_what_is_no_environment_is_refused_before_anything_starts(
    talked: RecordedRun, tmp_path: Path, capsys: pytest.CaptureFixture[str], name: str
) -> None:
    words = ["--model", str(talked.model), "--prompts", str(talked.home / "prompts.jsonl")]
    assert main(["rollout", *words, "--run-dir", str(tmp_path / "run"), "--environment", name]) == 2
    assert "environment" in capsys.readouterr().err.splitlines()[0]
    assert not (tmp_path / "run" / "run.json").exists()
