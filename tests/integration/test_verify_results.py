# SPDX-License-Identifier: Apache-2.0
"""`seer verify` finds whatever was done to a run's results, and names its kind."""

from __future__ import annotations

import json
from typing import Any

import pytest

pytest.importorskip("torch")

from recorded_runs import MAX_TOKENS, NUM_PROMPTS, VOCABULARY, Damage, N, RecordedRun
from seer.cli.main import main

END_TOKEN = 2
"""Of the tiny model."""


def without(position: int) -> Damage:
    return lambda run: run.write_responses([one for at, one in enumerate(run.responses()) if at != position])


def doubled(position: int) -> Damage:
    return lambda run: run.write_responses([*run.responses(), run.responses()[position]])


def changed(position: int, **changes: Any) -> Damage:
    return lambda run: run.change_response(position, **changes)


def cut_short(run: RecordedRun, **changes: Any) -> None:
    """The last response without its last three tokens, in every field that counts them."""
    one = run.responses()[-1]
    kept = {name: one[name][:-3] for name in ("token_ids", "logprobs", "raw_logprobs")}
    run.change_response(-1, **kept, num_tokens=len(kept["token_ids"]), text=None, **changes)


def in_every_response(**changes: Any) -> Damage:
    return lambda run: run.write_responses([one | changes for one in run.responses()])


def by_reason(run: RecordedRun, reason: str) -> int:
    return next(at for at, one in enumerate(run.responses()) if one["finish_reason"] == reason)


def other_reason(reason: str, new: str) -> Damage:
    return lambda run: run.change_response(by_reason(run, reason), finish_reason=new)


def early_end(run: RecordedRun) -> None:
    position = by_reason(run, "length")
    tokens = run.responses()[position]["token_ids"]
    run.change_response(position, token_ids=[*tokens[:4], END_TOKEN, *tokens[5:]])


FOUND: dict[str, tuple[Damage, dict[str, int]]] = {
    "deleted": (without(4), {"missing": 1}),
    "a deleted group": (
        lambda run: run.write_responses([one for one in run.responses() if one["group"] != 1]),
        {"missing": N},
    ),
    "all deleted": (lambda run: run.write_responses([]), {"missing": NUM_PROMPTS * N}),
    "doubled": (doubled(0), {"doubled": 1}),
    "doubled twice": (lambda run: (doubled(0)(run), doubled(0)(run)), {"doubled": 2}),
    "doubled in the place of another": (
        lambda run: run.write_responses([run.responses()[0], *run.responses()[:-1]]),
        {"doubled": 1, "missing": 1},
    ),
    "cut short": (cut_short, {"end": 1, "text": 1}),
    "cut short as if by length": (lambda run: cut_short(run, finish_reason="length"), {"end": 1, "text": 1}),
    "cut short as if stopped": (lambda run: cut_short(run, finish_reason="stop"), {"end": 1, "text": 1}),
    "another seed": (changed(2, seed=7), {"seed": 1}),
    "one seed for all": (in_every_response(seed=7), {"seed": NUM_PROMPTS * N}),
    "another run's seed": (
        lambda run: run.write_manifest(config=run.manifest()["config"] | {"seed": 1}),
        {"seed": NUM_PROMPTS * N, "settings": 1},
    ),
    "altered text": (changed(3, text="w1 w1"), {"text": 1}),
    "no text": (changed(3, text=None), {"text": 1}),
    "a length that was a stop": (other_reason("length", "stop"), {"end": 1}),
    "a stop that was a length": (other_reason("stop", "length"), {"end": 1}),
    "an end token in the middle": (early_end, {"end": 1, "text": 1}),
    "failed": (changed(1, finish_reason="failed", error="lost"), {"unfinished": 1}),
    "cancelled": (changed(1, finish_reason="cancelled"), {"unfinished": 1}),
    "complete with an error": (changed(1, error="lost"), {"end": 1}),
    "another prompt's index": (changed(0, index=N), {"unknown": 1, "missing": 1}),
    "a negative index": (changed(0, index=-1), {"unknown": 1, "missing": 1}),
    "another prompt": (changed(0, prompt_id="p9"), {"unknown": 1}),
    "a prompt out of range": (changed(0, group=NUM_PROMPTS), {"unknown": 1, "missing": 1}),
    "a negative prompt": (changed(0, group=-1), {"unknown": 1, "missing": 1}),
    "a token outside the vocabulary": (
        changed(0, token_ids=[VOCABULARY], num_tokens=1),
        {"counts": 1, "vocabulary": 1},
    ),
    "a negative token": (changed(0, token_ids=[-1] * 3), {"counts": 1, "vocabulary": 1}),
    "a log-probability less": (
        lambda run: run.change_response(0, logprobs=run.responses()[0]["logprobs"][1:]),
        {"counts": 1},
    ),
    "a raw log-probability less": (
        lambda run: run.change_response(0, raw_logprobs=run.responses()[0]["raw_logprobs"][1:]),
        {"counts": 1},
    ),
    "another count": (changed(0, num_tokens=1), {"counts": 1}),
    "another prompt length": (changed(0, num_prompt_tokens=1), {"counts": 1}),
    "another weights version": (changed(5, weights_version=4), {"weights_version": 1}),
    "no tokens": (
        changed(0, token_ids=[], logprobs=[], raw_logprobs=[], num_tokens=0, text=""),
        {"end": 1},
    ),
}


@pytest.mark.parametrize("name", FOUND)
def test_whatever_was_done_to_the_results_is_found_by_its_kind(
    run_copy: RecordedRun, capsys: pytest.CaptureFixture[str], name: str
) -> None:
    damage, kinds = FOUND[name]
    damage(run_copy)
    assert main(["verify", str(run_copy.path), "--json"]) == 1
    shown = json.loads(capsys.readouterr().out)
    assert {one["kind"]: one["count"] for one in shown["findings"]} == kinds
    assert not shown["is_clean"]
    assert run_copy.manifest()["verification"] == shown
    assert main(["verify", str(run_copy.path)]) == 1
    printed = capsys.readouterr().out
    assert printed.splitlines()[-1].split(maxsplit=1) == ["verdict", "NOT CLEAN"]
    assert printed.count("the first: ") == len(kinds)


def test_an_untouched_run_is_clean_and_its_two_ends_were_met(
    run_copy: RecordedRun, capsys: pytest.CaptureFixture[str]
) -> None:
    assert {one["finish_reason"] for one in run_copy.responses()} == {"stop", "length"}
    assert max(one["num_tokens"] for one in run_copy.responses()) == MAX_TOKENS
    assert main(["verify", str(run_copy.path), "--share", "1", "--json"]) == 0
    shown = json.loads(capsys.readouterr().out)
    assert (shown["findings"], shown["num_checked"], shown["num_responses"]) == ([], 9, 9)
    assert main(["report", str(run_copy.path)]) == 0


def test_tokens_that_keep_every_count_are_found_by_scoring(
    run_copy: RecordedRun, capsys: pytest.CaptureFixture[str]
) -> None:
    position = by_reason(run_copy, "length")
    one = run_copy.responses()[position]
    tokens = one["token_ids"]
    other = next(token for token in range(3, VOCABULARY) if token != tokens[5])
    tokens[5] = other
    run_copy.change_response(position, token_ids=tokens, text=" ".join(f"w{token}" for token in tokens))
    assert main(["verify", str(run_copy.path), "--share", "1", "--json"]) == 1
    shown = json.loads(capsys.readouterr().out)
    assert shown["findings"] == []
    assert shown["num_mismatches"] >= 1


def test_only_the_first_prompts_are_asked_for_with_a_limit(run_copy: RecordedRun) -> None:
    run_copy.write_manifest(config=run_copy.manifest()["config"] | {"limit": 2})
    assert main(["verify", str(run_copy.path)]) == 1  # one prompt more than asked for
    run_copy.write_responses([one for one in run_copy.responses() if one["group"] < 2])
    run_copy.file("journal.jsonl").unlink()  # it knows of three
    assert main(["verify", str(run_copy.path)]) == 0


@pytest.mark.parametrize("words", [["--sample", "0"], ["--sample", "-5"], ["--share", "0"], ["--share", "nan"]])
def test_an_impossible_sample_is_refused(run_copy: RecordedRun, words: list[str]) -> None:
    try:
        code = main(["verify", str(run_copy.path), *words])
    except SystemExit as leaving:
        code = int(leaving.code or 0)
    assert code == 2
