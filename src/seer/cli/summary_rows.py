# SPDX-License-Identifier: Apache-2.0
"""The summary of a run as rows of a table: words and units that a reader knows, and no row for what was not used.

Invariants
  1. A number of `ALWAYS` has a row wherever the run has it, also when it is 0.
  2. Any other number has a row where it is not 0. `run.json` and `--json` have all of them.
"""

from __future__ import annotations

from collections.abc import Mapping

ALWAYS = {
    "num_requests": "responses",
    "num_tokens": "tokens",
    "throughput_tokens_s": "tokens per second",
    "makespan_s": "makespan, s",
    "tail_s": "tail (last tenth of the responses), s",
    "group_median_s": "half of the groups complete after, s",
    "group_p90_s": "90% of the groups complete after, s",
    "group_last_s": "all groups complete after, s",
    "idle_share": "idle share of the instances",
    "mean_accepted": "tokens per request and step",
    "preemptions": "preemptions",
    "recomputed_tokens": "recomputed tokens",
    "migrations": "migrations",
}
"""Field of `seer.metrics.summary.Summary` -> its words, in the order of the table."""
SHARES = ("idle_share",)


def summary_rows(numbers: Mapping[str, float]) -> list[tuple[str, str]]:
    """Words and value of each number; `numbers` has only those that the run knows."""
    rows = [(words, _value(name, numbers[name])) for name, words in ALWAYS.items() if name in numbers]
    others = ((name, value) for name, value in numbers.items() if name not in ALWAYS and value)
    return rows + [(_words(name), _value(name, value)) for name, value in others]


def _words(name: str) -> str:
    plain, _, unit = name.rpartition("_")
    return f"{plain.replace('_', ' ')}, s" if unit == "s" else name.removeprefix("num_").replace("_", " ")


def _value(name: str, value: float) -> str:
    if name in SHARES:
        return f"{value:.1%}"
    return f"{value:,.3f}" if isinstance(value, float) else f"{value:,}"
