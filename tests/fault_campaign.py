# SPDX-License-Identifier: Apache-2.0
"""The fault campaign: rollouts that are struck at random, each compared token by token with an undisturbed one.

SEER_FAULT_ROUNDS says how many rounds there are in all; a few by default, 1,000 in `make test-faults`. The strikes of a
round follow from SEER_FAULT_SEED and the round's number. Without it the seed is random; it is printed, and a failure
names it: the same seed and number of rounds strike in the same way again.

SEER_FAULT_SECONDS bounds each test: after that time no round is begun.

SEER_FAULT_REPORT names a file to which each test appends lines of JSON with its counts so far; the last one counts.
tests/crash/campaign.py runs many such tests side by side and adds their reports up.
"""

from __future__ import annotations

import json
import os
import random
import secrets
import time
from collections import Counter
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from campaign_leftovers import leftovers, processes
from seer import FinishReason, GroupResult
from seer.metrics.events import Event, Started, Stopped

ROUNDS = int(os.environ.get("SEER_FAULT_ROUNDS", "6"))
SEED = int(os.environ.get("SEER_FAULT_SEED", "0")) or secrets.randbelow(2**32)
SECONDS = float(os.environ.get("SEER_FAULT_SECONDS", "inf"))
REPORT = os.environ.get("SEER_FAULT_REPORT")
Tokens = dict[tuple[int, int], list[int]]
ONE_IN = {"vllm": 25, "ray": 40, "mooncake": 50, "tcp": 10, "http": 10, "driver": 25, "hosting": 5}
"""Of all rounds, those of each part; the rest are local ones."""
AT_LEAST_ONE = ("mooncake", "tcp", "http", "driver", "hosting")
"""vLLM and Ray take half a minute to start: they take part from so many rounds on."""


def num_rounds_of(part: str) -> int:
    """How many rounds a part has."""
    if part == "local":
        return max(1, ROUNDS - sum(ROUNDS // share for share in ONE_IN.values()))
    return max(part in AT_LEAST_ONE, ROUNDS // ONE_IN[part])


def rng_of(test: str, number: int) -> random.Random:
    """The random numbers of one round."""
    return random.Random(f"{SEED} {test} {number}")


@dataclass
class Tally:
    """What one test of the campaign did and found."""

    test: str
    seed: int = SEED
    rounds: int = 0
    strikes: Counter[str] = field(default_factory=Counter)
    responses: int = 0
    tokens: int = 0
    differences: int = 0
    leftovers: int = 0
    instances_lost: int = 0
    start_s: float = field(default_factory=time.monotonic)

    def __post_init__(self) -> None:
        self._before = set(processes())
        print(f"\nSEER_FAULT_SEED={SEED} SEER_FAULT_ROUNDS={ROUNDS}", flush=True)

    def goes_on(self, num_rounds: int) -> bool:
        """Whether one more of so many rounds is to be begun."""
        return self.rounds < num_rounds and time.monotonic() - self.start_s < SECONDS

    def compare(self, tokens: Mapping[Any, list[int]], expected: Mapping[Any, list[int]], strikes: list[str]) -> None:
        """Compare a round with the undisturbed one and count it."""
        differing = [key for key in {*tokens, *expected} if tokens.get(key) != expected.get(key)]
        self.differences += len(differing)
        if differing:
            self.save()  # it counts, though the test ends here
        assert not differing, f"{self.story(strikes)}: {len(differing)} responses differ, the first is {differing[0]}"
        print(f"{self.test} {self.rounds}: {', '.join(strikes) or 'nothing'}", flush=True)
        self.rounds += 1
        self.strikes.update(strikes)
        self.responses += len(tokens)
        self.tokens += sum(map(len, tokens.values()))

    def check_ends(self, groups: list[GroupResult], weights_version: int, strikes: list[str]) -> None:
        """Every response ended by itself, under the newest weights."""
        responses = [r for group in groups for r in group.responses]
        assert {r.finish_reason for r in responses} <= {FinishReason.STOP, FinishReason.LENGTH}, self.story(strikes)
        assert {r.weights_version for r in responses} == {weights_version}, self.story(strikes)

    def finish(self) -> None:
        """The test is over: save the counts, and check that there was something to count."""
        self.save()
        assert self.strikes or not self.rounds, "nothing was struck"

    def save(self) -> None:
        """Print the counts so far and add them to the report."""
        counts = {name: value for name, value in vars(self).items() if name not in ("start_s", "_before")}
        seconds = round(time.monotonic() - self.start_s, 1)
        line = json.dumps(counts | {"seconds": seconds, "strikes": dict(self.strikes.most_common())})
        print(f"\n{line}", flush=True)
        if REPORT:
            with open(REPORT, "a") as report:
                report.write(f"{line}\n")

    def check_leftovers(self, files: Iterable[Path] = (), *, all_files: bool = True) -> None:
        """Nothing is left after a fleet was closed or a command ended: no process, and none of these files.

        `all_files`: nor any other, where that can be told.
        """
        left = [str(path) for path in files if path.exists()] + leftovers(self._before, with_files=all_files)
        self.leftovers += len(left)
        if left:
            self.save()
        assert not left, f"{self.test}, round {self.rounds}: left behind: {left}"

    def story(self, strikes: list[str]) -> str:
        """What was done to the round at hand, for the message of an assertion."""
        replay = f"SEER_FAULT_SEED={SEED} SEER_FAULT_ROUNDS={ROUNDS} replays it"
        return f"{self.test}, round {self.rounds}, after {strikes} ({replay})"


def tokens_of(groups: list[GroupResult]) -> Tokens:
    """The tokens of every response."""
    tokens = {(r.group, r.index): r.token_ids for group in groups for r in group.responses}
    assert len(tokens) == sum(len(group.responses) for group in groups), "a response came twice"
    return tokens


class StrikesAt:
    """An event sink that strikes when so many chunks have started or stopped."""

    def __init__(self, plan: dict[int, tuple[str, Callable[[], None]]]) -> None:
        self._plan = plan
        self._num_seen = 0
        self.done: list[str] = []

    def __call__(self, event: Event) -> None:
        if isinstance(event, Started | Stopped):
            self._num_seen += 1
            if self._num_seen in self._plan:
                name, strike = self._plan[self._num_seen]
                strike()
                self.done.append(name)
