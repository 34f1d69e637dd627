# SPDX-License-Identifier: Apache-2.0
"""The report's section on a training run: reward, lengths, time and the on-policy check, step by step.

Read from the folder that `seer.integrations` writes: rollouts.jsonl and trainer.jsonl. Of two lines about the same
rollout the later one counts: a resumed run makes the last steps of the interrupted one again.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NotRequired, TypedDict, TypeVar

import msgspec

from seer.errors import InputError
from seer.machine.given_files import RECORD_BYTES, read_given
from seer.machine.json_files import UNREADABLE
from seer.report.charts import WIDTH, line_legend
from seer.report.html_table import html_table
from seer.report.svg import Frame, chart, colour, steps
from seer.runs.run_folder import RunFolder

NUM_ROWS = 20
"""Newest steps in the table; the charts show all of them."""

L = TypeVar("L")
Number = int | float | None
LogLine = dict[str, Number]


class OnPolicyLine(TypedDict):
    """The on-policy check of a rollout."""

    mean_gap: float | None
    """None in the file is not a number, so the rollout was off policy."""
    limit: float
    mean_ratio: NotRequired[float | None]
    largest_gap: NotRequired[float | None]


class RolloutLine(TypedDict):
    """A line of rollouts.jsonl."""

    step: int
    call: int
    mode: str
    rollout_s: float
    since_last_s: float | None
    weights_version: NotRequired[int]
    num_prompts: NotRequired[int]
    num_responses: NotRequired[int]
    num_tokens: NotRequired[int]
    mean_tokens: NotRequired[float]
    longest_tokens: NotRequired[int]
    weights_s: NotRequired[float]
    check_s: NotRequired[float]
    tail_s: NotRequired[float]
    num_known: NotRequired[int]
    reward_errors: NotRequired[int]
    num_turns: NotRequired[int]
    tool_wait_s: NotRequired[float]
    tool_failures: NotRequired[int]
    on_policy: NotRequired[OnPolicyLine | None]


@dataclass(frozen=True, slots=True)
class TrainingStep:
    """One rollout of the training phase, and the trainer's log of its step."""

    rollout: RolloutLine
    log: LogLine
    loop_s: float | None
    """From the start of this rollout to the start of the next; None for the last one."""

    def get(self, name: str) -> float | None:
        """A number of the rollout, of its on-policy check, or of the trainer's log."""
        if name == "rollout_share":
            return self.rollout["rollout_s"] / self.loop_s if self.loop_s else None
        if name == "loop_s":
            return self.loop_s
        sources: tuple[Mapping[str, Any], ...] = (self.rollout, self.rollout.get("on_policy") or {}, self.log)
        for source in sources:
            if source.get(name) is not None:
                return float(source[name])
        return None


COLUMNS = (
    ("step", "step", "{:.0f}"),
    ("reward", "reward", "{:.3f}"),
    ("mean_tokens", "mean tokens", "{:.0f}"),
    ("longest_tokens", "longest", "{:.0f}"),
    ("rollout_s", "rollout s", "{:.2f}"),
    ("loop_s", "whole step s", "{:.2f}"),
    ("rollout_share", "rollout share", "{:.0%}"),
    ("tail_s", "tail s", "{:.2f}"),
    ("mean_ratio", "mean ratio", "{:.4f}"),
    ("mean_gap", "mean gap", "{:.1e}"),
    ("largest_gap", "largest gap", "{:.1e}"),
    ("reward_errors", "rewards missing", "{:.0f}"),
)


def read_training(folder: RunFolder) -> list[TrainingStep]:
    """The training rollouts of a run, in order."""
    lines = _lines(folder.path / "rollouts.jsonl", RolloutLine)
    rollouts = {(line["step"], line["call"]): line for line in lines if line["mode"] == "train"}
    if not rollouts:
        raise InputError(f"{folder.path} holds no rollout", hint="it ended before the first step")
    logs = {line.get("step"): line for line in _lines(folder.path / "trainer.jsonl", LogLine) if "reward" in line}
    ordered = [rollouts[key] for key in sorted(rollouts)]
    loops_s = [line["since_last_s"] for line in ordered[1:]] + [None]
    # The trainer logs a step after it has counted it, so under the next number.
    return [
        TrainingStep(line, logs.get(line["step"] + 1, {}), loop_s)
        for line, loop_s in zip(ordered, loops_s, strict=True)
    ]


def newest_step(folder: RunFolder) -> RunFolder:
    """The newest rollout whose events were kept."""
    kept = sorted(folder.path.glob("step-*/run.json"), key=lambda path: path.stat().st_mtime)
    if not kept:
        raise InputError(f"{folder.path} keeps no rollout's events", hint="seer_rollouts(keep_steps=...)")
    return RunFolder(kept[-1].parent)


def training_section(run: Sequence[TrainingStep]) -> str:
    """HTML: charts over the steps, and a table of the newest."""
    off = [step for step in run if _is_off(step)]
    verdict = (
        f"<p><b>{len(off)} of {len(run)} rollouts were off policy</b>, the first at step {off[0].rollout['step']}.</p>"
        if off
        else '<p class="soft">Every rollout that was checked was on policy.</p>'
    )
    charts = (
        ("Reward", ("reward",)),
        ("Tokens of a response", ("mean_tokens", "longest_tokens")),
        ("Seconds: rollout, and the whole step", ("rollout_s", "loop_s")),
        ("On-policy check: mean and largest gap of log-probabilities", ("mean_gap", "largest_gap")),
    )
    drawn = "".join(f"<h3>{title}</h3>{_lines_chart(run, names, title)}" for title, names in charts)
    return f"<h2>Training: {len(run)} rollouts</h2>{verdict}{drawn}{_table(run[-NUM_ROWS:])}"


def _is_off(step: TrainingStep) -> bool:
    check = step.rollout.get("on_policy")
    return check is not None and (check["mean_gap"] is None or check["mean_gap"] > check["limit"])


def _lines_chart(run: Sequence[TrainingStep], names: Sequence[str], title: str) -> str:
    series = {name: [(float(step.rollout["step"]), step.get(name)) for step in run] for name in names}
    known = {name: [(x, y) for x, y in points if y is not None] for name, points in series.items()}
    peak = max((y for points in known.values() for _, y in points), default=0.0)
    if not peak:
        return '<p class="soft">Nothing was reported.</p>'
    until = max(1.0, float(run[-1].rollout["step"]) + 1)
    frame = Frame(WIDTH, 150, until, peak * 1.05)
    body = [frame.axes("step", "")]
    body.extend(steps(frame, points, until, colour(i), name) for i, (name, points) in enumerate(known.items()))
    labels = {key: label for key, label, _ in COLUMNS}
    peak_text = f'<text class="unit" x="4" y="11">{peak:.3g} at most</text>'
    return line_legend([labels[name] for name in known]) + chart(frame, "".join(body) + peak_text, title)


def _table(run: Sequence[TrainingStep]) -> str:
    def cell(step: TrainingStep, key: str, form: str) -> str:
        value = step.get(key)
        return "-" if value is None else form.format(value)

    rows = ([cell(step, key, form) for key, _, form in COLUMNS] for step in run)
    return html_table([label for _, label, _ in COLUMNS], rows)


def _lines(path: Path, kind: type[L]) -> list[L]:
    """The lines of a file, none if there is no file; one that a kill cut off is left out."""
    if not path.is_file():
        return []
    decoder = msgspec.json.Decoder(kind)
    lines = read_given(path, limit_bytes=RECORD_BYTES).split(b"\n")[:-1]
    try:
        return [decoder.decode(line) for line in lines]
    except UNREADABLE as error:
        raise InputError(f"{path}: {error}", hint="the file was damaged") from None
