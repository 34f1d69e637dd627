# SPDX-License-Identifier: Apache-2.0
"""Run folders with damage of every kind: each verb that reads one refuses it in a line, or gives the right answer."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("torch")

from recorded_runs import Damage, RecordedRun
from seer.cli.main import main
from seer.engine.local.tiny import make_tiny_model
from seer.ranges import INT32_MAX

HTML = "<script>alert(1)</script>"


def words(verb: str, run: RecordedRun) -> list[str]:
    if verb == "resume":
        return ["rollout", "--resume", str(run.path), "--quiet", "--json"]
    if verb == "replay":
        return ["replay", str(run.path), "--scheduler", "verl"]
    return [verb, str(run.path)]


def cut(name: str, share: float = 0.5) -> Damage:
    def damage(run: RecordedRun) -> None:
        content = run.file(name).read_bytes()
        run.file(name).write_bytes(content[: int(len(content) * share)])

    return damage


def removed(name: str) -> Damage:
    return lambda run: run.file(name).unlink()


def made_a_folder(name: str) -> Damage:
    def damage(run: RecordedRun) -> None:
        run.file(name).unlink()
        run.file(name).mkdir()

    return damage


def content(name: str, text: str) -> Damage:
    return lambda run: run.file(name).write_text(text)


def manifest(**changes: Any) -> Damage:
    return lambda run: run.write_manifest(**changes)


def option(**changes: Any) -> Damage:
    return lambda run: run.write_manifest(options=run.manifest()["options"] | changes)


def lines(name: str, *order: int) -> Damage:
    """The file again with these of its lines; negative numbers count from the end."""

    def damage(run: RecordedRun) -> None:
        old = run.lines(name)
        run.write_lines(name, [old[number] for number in order] if order else [])

    return damage


def without_line(name: str, number: int) -> Damage:
    def damage(run: RecordedRun) -> None:
        old = run.lines(name)
        run.write_lines(name, old[:number] + old[number + 1 :])

    return damage


def doubled_line(name: str, number: int) -> Damage:
    def damage(run: RecordedRun) -> None:
        old = run.lines(name)
        run.write_lines(name, old[: number + 1] + old[number:])

    return damage


def swapped_lines(name: str) -> Damage:
    def damage(run: RecordedRun) -> None:
        old = run.lines(name)
        run.write_lines(name, [old[0], old[2], old[1], *old[3:]])

    return damage


def changed_token(run: RecordedRun) -> None:
    old = run.lines("journal.jsonl")
    line = json.loads(old[3])
    line["spans"][0]["ids"][0] ^= 1
    old[3] = json.dumps(line, separators=(",", ":")).encode() + b"\n"
    run.write_lines("journal.jsonl", old)


def changed_line(name: str, number: int, **changes: Any) -> Damage:
    def damage(run: RecordedRun) -> None:
        old = run.lines(name)
        old[number] = json.dumps(json.loads(old[number]) | changes, separators=(",", ":")).encode() + b"\n"
        run.write_lines(name, old)

    return damage


def every(kind: str | None = None, **changes: Any) -> Damage:
    """All events of this kind, or of any, with these values."""

    def damage(run: RecordedRun) -> None:
        header, *events = map(json.loads, run.lines("events.jsonl"))
        events = [one | changes if kind in (None, one["kind"]) else one for one in events]
        run.write_lines("events.jsonl", [json.dumps(one).encode() + b"\n" for one in (header, *events)])

    return damage


def years_of_chunks(run: RecordedRun) -> None:
    every("ended", num_generated=INT32_MAX)(run)
    limits = {"kv_blocks": 1 << 40, "block_size": 16, "max_num_seqs": 16, "max_model_len": 1 << 40}
    run.write_manifest(options=run.manifest()["options"] | {"chunk_tokens": 1, "max_tokens": INT32_MAX}, limits=limits)


def added_line(name: str, text: str) -> Damage:
    return lambda run: run.write_lines(name, [*run.lines(name), text.encode() + b"\n"])


def swapped_weights(run: RecordedRun) -> None:
    make_tiny_model(run.model, seed=1)


def one_changed_weight(run: RecordedRun) -> None:
    path = run.model / "model.safetensors"
    whole = bytearray(path.read_bytes())
    whole[-3] ^= 1
    path.write_bytes(whole)


REFUSED = 2
NOT_CLEAN = 1
LIMITS = ("kv_blocks", "block_size", "max_num_seqs", "max_model_len")
STARTED = '{"kind":"started","t_s":1.0,"request":0,"instance":%s,"max_tokens":1,"moved_from":null,"load_kv":false}'
READERS = {"resume": REFUSED, "verify": REFUSED, "report": REFUSED, "replay": REFUSED}
DAMAGES: dict[str, tuple[Damage, dict[str, int]]] = {
    "run.json is missing": (removed("run.json"), READERS),
    "run.json is empty": (content("run.json", ""), READERS),
    "run.json is cut": (cut("run.json"), READERS),
    "run.json is another object": (content("run.json", '{"name": "other"}'), READERS),
    "run.json is a list": (content("run.json", "[]"), READERS),
    "run.json is no text": (lambda run: run.file("run.json").write_bytes(b"\xff\xfe\x00"), READERS),
    "run.json is a folder": (made_a_folder("run.json"), READERS),
    "its options are text": (manifest(options="many"), READERS),
    "its instances are text": (option(instances="two"), READERS),
    "its instances are negative": (option(instances=-1), READERS),
    "its instances are a billion": (option(instances=10**9), READERS),
    "its instances are a hundred thousand": (option(instances=100_000), READERS),
    "its scheduler is a number": (option(scheduler=7), READERS),
    "its model is a list": (option(model=[HTML]), READERS),
    "its cores are HTML": (manifest(machine={"cpu": "x", "cores": HTML}), READERS),
    "its configuration is a list": (manifest(config=[1]), READERS),
    "its configuration has an unknown key": (manifest(config={"nn": 3}), {"resume": REFUSED, "verify": REFUSED}),
    "its limits are text": (manifest(limits={"kv_blocks": "8"}), READERS),
    "its limits have 400 digits": (manifest(limits=dict.fromkeys(LIMITS, int("9" * 400))), READERS),
    "its limits are missing": (manifest(limits=None), {"report": REFUSED, "replay": REFUSED}),
    "its command is a number": (manifest(command=3), READERS),
    "its command is unknown": (manifest(command="bake"), READERS),
    "its summary is text": (manifest(summary=HTML), READERS),
    "a number of its summary is text": (manifest(summary={"num_tokens": HTML}), READERS),
    "its verification is text": (manifest(verification=HTML), READERS),
    "its model folder is gone": (manifest(model_dir="/nowhere"), {"verify": REFUSED}),
    "its model folder is a number": (manifest(model_dir=5), READERS),
    "events are missing": (removed("events.jsonl"), {"report": REFUSED, "replay": REFUSED}),
    "events are empty": (content("events.jsonl", ""), {"report": REFUSED, "replay": REFUSED}),
    "events are foreign": (content("events.jsonl", "hello\n"), {"report": REFUSED, "replay": REFUSED}),
    "events have a bad line": (added_line("events.jsonl", '{"kind":"ended"}'), {"report": REFUSED, "replay": REFUSED}),
    "events name an unknown instance": (
        added_line("events.jsonl", STARTED % 7),
        {"report": REFUSED, "replay": REFUSED},
    ),
    "events name a negative instance": (added_line("events.jsonl", STARTED % -1), {"report": REFUSED}),
    "events end an unknown request": (
        added_line("events.jsonl", '{"kind":"ended","t_s":1.0,"request":99,"num_generated":1,"finish_reason":"stop"}'),
        {"report": REFUSED, "replay": REFUSED},
    ),
    "events end a request for no known reason": (
        added_line("events.jsonl", '{"kind":"ended","t_s":1.0,"request":0,"num_generated":1,"finish_reason":"x"}'),
        {"report": REFUSED, "replay": REFUSED},
    ),
    "events stop what never started": (
        added_line(
            "events.jsonl",
            '{"kind":"stopped","t_s":1.0,"request":0,"instance":0,"num_generated":1,"reason":"limit"}',
        ),
        {"report": REFUSED},
    ),
    "events hold no request": (lines("events.jsonl", 0), {"report": REFUSED, "replay": REFUSED}),
    "events end with no token": (every("ended", num_generated=0), {"replay": REFUSED}),
    "events take no time": (every(t_s=1.0), {"replay": REFUSED}),
    "events name a response twice": (every("queued", group=0, index=0), {"replay": REFUSED}),
    "events are of years of chunks": (years_of_chunks, {"replay": REFUSED}),
    "the journal is missing": (removed("journal.jsonl"), {"resume": REFUSED}),
    "the journal is empty": (content("journal.jsonl", ""), {"resume": REFUSED}),
    "the journal's first line is cut": (content("journal.jsonl", '{"type":"seer-jour'), {"resume": REFUSED}),
    "the journal is foreign": (content("journal.jsonl", "hello\n"), {"resume": REFUSED}),
    "the journal has no chunk": (lines("journal.jsonl", 0), {"resume": REFUSED}),
    "the journal has a doubled line": (doubled_line("journal.jsonl", 3), {"resume": REFUSED}),
    "the journal has a doubled last line": (doubled_line("journal.jsonl", -1), {"resume": REFUSED}),
    "the journal lacks a line": (without_line("journal.jsonl", 3), {"resume": REFUSED}),
    "the journal has swapped lines": (swapped_lines("journal.jsonl"), {"resume": REFUSED}),
    "the journal has a changed token": (changed_token, {"resume": REFUSED}),
    "the journal has another version": (changed_line("journal.jsonl", 0, version=1), {"resume": REFUSED}),
    "the journal has a foreign line": (added_line("journal.jsonl", '{"type":"chunk"}'), {"resume": REFUSED}),
    "the weights were swapped": (swapped_weights, {"resume": REFUSED, "verify": NOT_CLEAN}),
    "one weight was changed": (one_changed_weight, {"resume": REFUSED, "verify": NOT_CLEAN}),
    "the model's settings were changed": (
        lambda run: (run.model / "config.json").write_text(
            (run.model / "config.json").read_text().replace("10000.0", "20000.0")
        ),
        {"resume": REFUSED, "verify": NOT_CLEAN},
    ),
    "results are missing": (removed("results.jsonl"), {"verify": REFUSED}),
    "results are empty": (content("results.jsonl", ""), {"verify": NOT_CLEAN}),
    "results are cut": (cut("results.jsonl", 0.7), {"resume": REFUSED, "verify": REFUSED}),
    "results are foreign": (content("results.jsonl", "notes\n"), {"resume": REFUSED, "verify": REFUSED}),
    "results are a folder": (
        made_a_folder("results.jsonl"),
        {"resume": REFUSED, "verify": REFUSED},
    ),
    "results have a wrong type": (
        lambda run: run.change_response(0, token_ids="1 2 3"),
        {"resume": REFUSED, "verify": REFUSED},
    ),
    "results have a token that the journal lacks": (
        lambda run: run.change_response(0, token_ids=[5] * 7),
        {"resume": REFUSED, "verify": NOT_CLEAN},
    ),
    "prompts are missing": (removed("prompts.jsonl"), {"resume": REFUSED, "verify": REFUSED}),
    "prompts are empty": (content("prompts.jsonl", ""), {"resume": REFUSED, "verify": REFUSED}),
    "prompts were changed": (
        content("prompts.jsonl", '{"prompt": "w9", "id": "p0"}\n'),
        {"resume": REFUSED, "verify": NOT_CLEAN},
    ),
    "prompts are foreign": (content("prompts.jsonl", "\x00\x01"), {"resume": REFUSED, "verify": REFUSED}),
}
CASES = [(name, verb, code) for name, (_, codes) in DAMAGES.items() for verb, code in codes.items()]


@pytest.mark.parametrize(("name", "verb", "code"), CASES, ids=[f"{name}: {verb}" for name, verb, _ in CASES])
def test_damage_is_refused_in_a_line_and_nothing_is_changed(
    run_copy: RecordedRun, capsys: pytest.CaptureFixture[str], name: str, verb: str, code: int
) -> None:
    DAMAGES[name][0](run_copy)
    before = run_copy.contents()
    assert main(words(verb, run_copy)) == code
    out, err = capsys.readouterr()
    assert "this is a bug" not in err
    if code == REFUSED:
        assert err.count("error: ") == 1, err
        assert run_copy.contents() == before
    else:
        assert "NOT CLEAN" in out


def results_of(run: RecordedRun) -> dict[tuple[str, int], list[int]]:
    return {(one["prompt_id"], one["index"]): one["token_ids"] for one in run.responses()}


@pytest.mark.parametrize(
    "damage",
    [
        cut("journal.jsonl", 0.6),
        removed("results.jsonl"),
        doubled_line("results.jsonl", 2),
        removed("events.jsonl"),
        cut("events.jsonl"),
    ],
    ids=["a torn journal", "no results", "a doubled response", "no events", "torn events"],
)
def test_damage_that_loses_nothing_is_mended_by_a_resume(run_copy: RecordedRun, damage: Damage) -> None:
    whole = results_of(run_copy)
    if damage is not None:
        damage(run_copy)
    torn = b"".join(run_copy.lines("journal.jsonl")[:-1])
    if not run_copy.file("journal.jsonl").read_bytes().endswith(b"\n"):
        run_copy.file("results.jsonl").unlink()  # they know more than the journal, which is refused
    assert main(words("resume", run_copy)) == 0
    assert results_of(run_copy) == whole
    assert len(run_copy.responses()) == len(whole)
    assert run_copy.file("journal.jsonl").read_bytes().startswith(torn)
    assert main(["verify", str(run_copy.path), "--share", "1"]) == 0
    assert main(["report", str(run_copy.path)]) == 0


def test_a_report_of_a_killed_run_shows_what_its_events_hold(run_copy: RecordedRun) -> None:
    cut("events.jsonl", 0.8)(run_copy)
    assert main(["report", str(run_copy.path)]) == 0


def test_nothing_in_a_run_folder_names_a_file_that_is_written(run_copy: RecordedRun, tmp_path: Path) -> None:
    outside = tmp_path / "outside"
    outside.write_text("mine")
    for name in ("report.html", "trace.json", "run.partial", "report.html.partial"):
        run_copy.file(name).symlink_to(outside)
    assert main(["report", str(run_copy.path)]) == 0
    assert main(["verify", str(run_copy.path)]) == 0
    assert outside.read_text() == "mine"
    assert not run_copy.file("report.html").is_symlink()
