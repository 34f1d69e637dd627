# SPDX-License-Identifier: Apache-2.0
"""Bad recordings of simulated runs as commands of `seer replay`, generated over the types of their fields."""

from __future__ import annotations

import json
import tempfile
import typing
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import Any

import msgspec

from bad_commands import BadCommand, json_values
from seer.metrics.events import Ended, Queued
from seer.metrics.jsonl import EventLog
from seer.ranges import INT32_MAX
from seer.sim.catalog import WorkloadOptions, load_workload
from seer.sim.cluster import simulate
from seer.sim.draft_model import DraftModel, PlainDrafts
from seer.sim.replay import _Cluster, _Cost, _Metadata, run_metadata

LENGTH = -100
"""Stands for the length of the first response."""
SECTIONS: dict[tuple[str, ...], Any] = {
    (): _Metadata,
    ("cluster",): _Cluster,
    ("cluster", "cost"): _Cost,
    ("cluster", "drafts"): DraftModel,
    ("cluster", "drafts", "plain"): PlainDrafts,
}
"""Types of the parts of a header."""
BROKEN = "the header has turns without tokens"
TURNS: dict[str, tuple[dict[str, Any], str]] = {
    "none": ({"ends": [], "given": [], "tool_s": []}, "not those of its requests"),
    "backwards": ({"ends": [LENGTH, LENGTH], "given": [1], "tool_s": [1, 1]}, BROKEN),
    "answers": ({"ends": [1, LENGTH], "given": [], "tool_s": [1, 1]}, BROKEN),
    "times": ({"ends": [1, LENGTH], "given": [1], "tool_s": [1]}, BROKEN),
    "negative": ({"ends": [-1, LENGTH], "given": [1], "tool_s": [1, 1]}, "ends"),
    "given": ({"ends": [1, LENGTH], "given": [-1], "tool_s": [1, 1]}, "given"),
    "long-tool": ({"ends": [LENGTH], "given": [], "tool_s": [1e300]}, "tool_s"),
}
"""Of the first request, and what is said of them."""
COUNTS = (-1, 1 << 63, 10**30, 10**400)


@cache
def recording(workload: str = "synthetic") -> tuple[str, ...]:
    """The lines of a small recording."""
    options: dict[str, Any] = {"groups": 2, "group_size": 2, "mean": 20, "maximum": 40, "instances": 2}
    run = load_workload(workload, WorkloadOptions(**options))
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "events.jsonl"
        with EventLog(path, run_metadata(run, "verl", "auto", 0)) as log:
            simulate(run, "verl", events=log)
        return tuple(path.read_text().splitlines())


def replay_cases() -> Iterator[BadCommand]:
    """Every field of a header, and the events that a replay is made from."""
    for path, kind in SECTIONS.items():
        for name, hint in typing.get_type_hints(kind, include_extras=True).items():
            if hint in (str, dict) or (*path, name) == ("cluster", "cost"):
                continue  # names: below
            for number, value in enumerate(json_values(hint)):
                shown = (
                    "not an event log" if {"NaN", "Infinity"} & set(json.dumps(value).strip("[]").split(", ")) else name
                )
                yield _header(f"{'.'.join((*path, name))}-{number}", (*path, name), value, mentions=shown)
    for name in ("nosuch", "", "../x"):
        yield _header(f"scheduler-{name!r}", ("scheduler",), name)
    yield _header("unknown-cost", ("cluster", "cost", "colour"), 5, mentions="colour")
    yield _header("a-billion-instances", ("cluster", "num_instances"), 10**9, mentions="num_instances")
    yield _header("slots-without-end", ("cluster", "max_num_seqs"), 10**9, mentions="max_num_seqs")
    for name, (turns, mentions) in TURNS.items():
        yield _turns(name, turns, mentions)
    for number, value in enumerate((*COUNTS, 0)):
        yield _event(f"prompt-{number}", Queued, {"num_prompt_tokens": value}, mentions="num_prompt_tokens")
        yield _event(f"length-{number}", Ended, {"num_generated": value}, mentions="num_generated|generated")
    for number, value in enumerate(COUNTS):
        yield _event(f"request-{number}", Queued, {"request": value}, mentions="request")
        yield _event(f"group-{number}", Queued, {"group": value}, mentions="group")
    yield _event("beyond-the-limit", Ended, {"num_generated": 10**12}, mentions="1 to 40")
    yield _event("beyond-memory", Queued, {"num_prompt_tokens": 2_000_000_000}, mentions="tokens")
    yield _event("time", Queued, {"t_s": 1e300}, mentions="t_s")
    yield _event("reason", Ended, {"finish_reason": "x"}, mentions="finish_reason")
    yield _event("doubled-request", Queued, {"request": 1}, mentions="request 1")
    yield _years_of_chunks()


def _header(name: str, path: tuple[str, ...], value: Any, mentions: str = "") -> BadCommand:
    first, *rest = recording()
    header = json.loads(first)
    place = header["metadata"]
    for key in path[:-1]:
        place[key] = place.get(key) or ({"acceptance": 0.5} if key == "plain" else {})
        place = place[key]
    place[path[-1]] = value
    return _case(f"header-{name}", [json.dumps(header), *rest], mentions)


def _turns(name: str, turns: dict[str, Any], mentions: str) -> BadCommand:
    first, *rest = recording("agent-tools")
    header = json.loads(first)
    every = header["metadata"]["turns"]
    length = every[0]["ends"][-1]
    every[0] = turns | {"ends": [length if end == LENGTH else end for end in turns["ends"]]}
    return _case(f"turns-{name}", [json.dumps(header), *rest], mentions)


def _event(name: str, kind: type[msgspec.Struct], changes: dict[str, Any], mentions: str) -> BadCommand:
    lines = list(recording())
    at = next(i for i, line in enumerate(lines) if json.loads(line)["kind"] == kind.__name__.lower())
    lines[at] = json.dumps(json.loads(lines[at]) | changes)
    return _case(f"event-{name}", lines, mentions)


def _years_of_chunks() -> BadCommand:
    header, *events = map(json.loads, recording())
    header["metadata"]["cluster"] |= {"max_tokens": INT32_MAX, "chunk_tokens": 1}
    events = [one | {"num_generated": INT32_MAX} if one["kind"] == "ended" else one for one in events]
    return _case("years-of-chunks", [json.dumps(one) for one in (header, *events)], mentions="chunks of 1 tokens")


def _case(name: str, lines: list[str], mentions: str) -> BadCommand:
    content = "".join(f"{line}\n" for line in lines).encode()
    return BadCommand(f"replay-{name}", ("replay", "bad.jsonl"), {"bad.jsonl": content}, mentions=mentions)
