# SPDX-License-Identifier: Apache-2.0
"""The folder of a training run, which `seer report` reads.

run.json          what was trained with what (`"command": "train"`)
rollouts.jsonl    one line per rollout: step, weights version, times, lengths, the on-policy check
trainer.jsonl     one line per log of the trainer: reward, loss and the rest, as TRL reports them
step-N/           the newest rollouts as run folders of their own (run.json, events.jsonl), for the report's timeline
                  and for `seer replay`

A run that was killed and resumed appends; of two lines for one rollout the later one counts.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from seer.hosting.fleet import HostedFleet
from seer.integrations.trl.on_policy import OnPolicyNumbers
from seer.integrations.trl.rollout_settings import RolloutSettings
from seer.metrics.summary import Summary
from seer.runs.manifest import recorded_limits
from seer.runs.run_folder import RunFolder, machine
from seer.runs.training_run import TrainingRun
from seer.types import FinishReason, GroupResult, Turn


@dataclass(frozen=True, slots=True, kw_only=True)
class RolloutLine:
    """One line of rollouts.jsonl."""

    step: int
    mode: str
    call: int
    """Counts the rollouts of this step."""
    weights_version: int
    num_prompts: int
    num_responses: int
    num_tokens: int
    mean_tokens: float
    longest_tokens: int
    rollout_s: float
    """From the trainer's call to the last response and reward."""
    weights_s: float
    """Of that, bringing new weights to the instances."""
    check_s: float
    """The on-policy check, after the rollout."""
    since_last_s: float | None
    """From the start of the previous rollout to the start of this one: a step of the whole training loop."""
    tail_s: float
    num_known: int
    """Prompts whose lengths an earlier epoch had shown."""
    reward_errors: int
    on_policy: OnPolicyNumbers | None
    num_turns: int = 0
    """Of the model; 0 without an environment."""
    tool_wait_s: float = 0.0
    """Seconds that responses waited for the environment, summed over them."""
    tool_failures: int = 0
    """Responses that failed."""

    @classmethod
    def of(cls, settings: RolloutSettings, call: int, found: Sequence[GroupResult], **measured: Any) -> RolloutLine:
        """The line of a rollout that is over."""
        responses = [response for group in found for response in group.responses]
        num_tokens = sum(response.num_tokens for response in responses)
        turns = [turn for response in responses for turn in response.turns]
        return cls(
            step=settings.step,
            mode=settings.mode,
            call=call,
            num_prompts=len(found),
            num_responses=len(responses),
            num_tokens=num_tokens,
            mean_tokens=num_tokens / len(responses),
            longest_tokens=max(response.num_tokens for response in responses),
            reward_errors=sum(response.reward_error is not None for response in responses),
            num_turns=sum(turn.kind == "generated" for turn in turns),
            tool_wait_s=sum(_seconds(turn) for turn in turns if turn.kind == "given"),
            tool_failures=sum(
                response.finish_reason is FinishReason.FAILED for response in responses if response.turns
            ),
            **measured,
        )


def _seconds(turn: Turn) -> float:
    return turn.ended_s - turn.began_s if turn.began_s is not None and turn.ended_s is not None else 0.0


def log_metrics(trainer: Any, line: RolloutLine) -> None:
    """Add a rollout's numbers to the trainer's own metrics."""
    metrics = trainer._metrics[line.mode]
    metrics["seer/rollout_s"].append(line.rollout_s)
    metrics["seer/weights_s"].append(line.weights_s)
    metrics["seer/tail_s"].append(line.tail_s)
    metrics["seer/tokens_per_s"].append(line.num_tokens / line.rollout_s)
    metrics["seer/weights_version"].append(float(line.weights_version))
    if line.since_last_s is not None:
        metrics["seer/loop_s"].append(line.since_last_s)
    if line.reward_errors:
        metrics["seer/reward_errors"].append(float(line.reward_errors))
    if line.num_turns:
        metrics["seer/turns_mean"].append(line.num_turns / line.num_responses)
        metrics["seer/tool_wait_s"].append(line.tool_wait_s)
        metrics["seer/tool_failures"].append(float(line.tool_failures))
    if line.on_policy is not None:
        metrics["seer/on_policy/mean_ratio"].append(line.on_policy.mean_ratio)
        metrics["seer/on_policy/mean_gap"].append(line.on_policy.mean_gap)
        metrics["seer/on_policy/largest_gap"].append(line.on_policy.largest_gap)


class TrainingRecord:
    """Writes the folder of one training run; no other trainer can while it does."""

    def __init__(self, path: Path, *, keep_steps: int) -> None:
        """Hold the folder; one that this trainer must not write to is refused."""
        self._run = TrainingRun(path, keep_steps=keep_steps)
        self._facts: dict[str, Any] = {}
        self.is_over = False
        """Nothing is written any more: another trainer may hold the folder."""

    @property
    def folder(self) -> RunFolder:
        """Where the run is recorded."""
        return self._run.folder

    def begin(self, options: dict[str, Any], fleet: HostedFleet) -> None:
        """Write run.json, once; called when the instances are up."""
        if not self._facts:
            self._facts = {"options": options, **recorded_limits(fleet.limits)}
            self._run.begin(self._facts)

    def open_step(self, settings: RolloutSettings, call: int) -> RunFolder | None:
        """The folder of the rollout that is about to begin; older ones make room. None where none is kept."""
        suffix = f".{call}" if call else ""
        step = self._run.open_step(f"{settings.step:06d}{suffix}" + ("-eval" if settings.mode == "eval" else ""))
        if step is not None:
            step.create()
            self._write_step(step, settings, "running", None)
        return step

    def close_step(self, step: RunFolder | None, settings: RolloutSettings, summary: Summary | None) -> None:
        """The rollout is over."""
        if step is not None:
            self._write_step(step, settings, "finished", summary)

    def write(self, line: RolloutLine) -> None:
        """Append a rollout."""
        self._run.append("rollouts.jsonl", line)

    def write_log(self, step: int, logs: dict[str, Any]) -> None:
        """Append what the trainer logged, unless the record is over."""
        if self.is_over:
            return
        numbers = {name: value for name, value in logs.items() if isinstance(value, int | float)}
        self._run.append("trainer.jsonl", {"step": step, **numbers})

    def end(self) -> None:
        """The trainer is done, or the program is; a second time changes nothing."""
        self.is_over = True
        self._run.close()

    def _write_step(self, step: RunFolder, settings: RolloutSettings, status: str, summary: Summary | None) -> None:
        asked = {"max_tokens": settings.sampling.max_tokens, "n": settings.group_size}
        step.write_manifest(
            {
                "command": "rollout",
                **self._facts,
                "options": self._facts["options"] | asked,
                "machine": machine(),
                "status": status,
                "summary": None if summary is None else asdict(summary),
            }
        )
